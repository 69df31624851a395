"""Contiv's CNI protocol (contiv 8.2), in front of a fake request handler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from weft.agent.cni.contiv import ContivCni
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.cni.errors import CniError, Code
from weft.cni.request import Add, Del, Request
from weft.domain import model
from weft.domain.addresses import parse_address
from weft.domain.desired.state import port_of
from weft.domain.errors import Exhausted
from weft.domain.ids import EndpointId, NetworkName, TenantName
from weft.lab.waiting import DEADLINE
from weft.ports.datapath import EndpointConfig, InterfaceAddress
from weft.runtime.admission import Guard, Limits
from weft.runtime.http import serving as serve_app

POD = {
    "K8S_POD_NAME": "web",
    "K8S_POD_NAMESPACE": "shop",
    "K8S_POD_INFRA_CONTAINER_ID": "c0ffee",
    "CNI_NETNS": "/run/netns/web",
    "CNI_IFNAME": "eth0",
}


class Handler:
    """Serves requests: records an attachment, or fails as the test says."""

    def __init__(self) -> None:
        self.attachment_store = AttachmentStore()
        self.served: list[Request] = []
        self.observed: list[tuple[str, str]] = []
        self.failure: Exception | None = None

    async def serve(self, request: Request) -> bytes:
        self.served.append(request)
        if self.failure:
            raise self.failure
        if isinstance(request, Add):
            self.attachment_store.put(attachment(request))
        return b""

    def observe(self, verb: str, outcome: str, seconds: float) -> None:
        self.observed.append((verb, outcome))


def attachment(request: Add) -> Attachment:
    endpoint = model.Endpoint(
        tenant=TenantName("default"),
        network=NetworkName("default-net"),
        endpoint_id=EndpointId(request.attachment.container),
        ip_address="10.1.1.9",
        ipv6_address="2001:db8::9",
        mac_address="02:02:0a:01:01:09",
        container_id=request.attachment.container,
        interface=request.attachment.ifname,
    )
    addresses = tuple(
        InterfaceAddress(parse_address(text, field="address"), length)
        for text, length in (("10.1.1.9", 24), ("2001:db8::9", 64))
    )
    config = EndpointConfig(
        port=port_of(endpoint), netns=request.netns, interface="eth0", addresses=addresses, mtu=1450
    )
    return Attachment(endpoint=endpoint, published=True, stage=Stage.ATTACHED, config=config)


class Caller:
    """Sends calls, and gives status and body."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def __call__(
        self, action: str, body: object, *, method: str = "POST", kind: str = "application/json"
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        url = f"http://contiv/{action}"
        async with self._session.request(method, url, data=data, headers={"Content-Type": kind}) as reply:
            return reply.status, msgspec.json.decode(await reply.read())


@asynccontextmanager
async def serving(handler: Handler, path: Path) -> AsyncIterator[Caller]:
    contiv = ContivCni(attachment_store=handler.attachment_store, serve=handler.serve, observe=handler.observe)
    timeout = aiohttp.ClientTimeout(total=DEADLINE)
    guard = Guard("contiv-cni", Limits())
    async with (
        serve_app(contiv.app(guard), (), tls=None, guard=guard, unix=path),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), timeout=timeout) as session,
    ):
        yield Caller(session)


async def test_a_pod_comes_and_goes(tmp_path: Path) -> None:
    handler = Handler()
    async with serving(handler, tmp_path / "contiv.sock") as call:
        assert await call("ContivCNI.AddPod", POD) == (
            200,
            {"endpointid": "c0ffee", "ipaddress": "10.1.1.9/24", "ipv6address": "2001:db8::9/64"},
        )
        assert await call("ContivCNI.DelPod", POD) == (200, {})
    add, delete = handler.served
    assert isinstance(add, Add)
    assert isinstance(delete, Del)
    assert add.attachment == delete.attachment == ("c0ffee", "eth0")
    assert (add.netns, add.arguments.pod_namespace, add.arguments.pod_name) == ("/run/netns/web", "shop", "web")
    assert handler.observed == [("ADD", "done"), ("DEL", "done")]
    assert not (tmp_path / "contiv.sock").exists()


@pytest.mark.parametrize(
    ("failure", "words", "code"),
    [
        (CniError(Code.FAILED, "already attached", details="see above"), "already attached", "100"),
        (Exhausted("no address is left"), "no address is left", "101"),
        (TimeoutError(), "did not finish in time", "11"),
    ],
)
async def test_failures_are_reported_as_contiv_does(tmp_path: Path, failure: Exception, words: str, code: str) -> None:
    """Status 500 and `result` 1 for every failure."""
    handler = Handler()
    handler.failure = failure
    async with serving(handler, tmp_path / "contiv.sock") as call:
        status, answer = await call("ContivCNI.AddPod", POD)
    assert (status, answer["result"]) == (500, 1)
    assert words in answer["errmsg"]
    assert handler.observed == [("ADD", code)]


@pytest.mark.parametrize(
    ("action", "body", "options", "status"),
    [
        ("ContivCNI.AddPod", b"{", {}, 400),
        ("ContivCNI.AddPod", [], {}, 400),
        ("ContivCNI.AddPod", b"[" * 100_000, {}, 400),
        ("ContivCNI.AddPod", b'{"K8S_POD_NAME":"\xff"}', {}, 400),
        ("ContivCNI.AddPod", {"K8S_POD_NAME": 7}, {}, 400),
        ("ContivCNI.AddPod", POD | {"K8S_POD_NAME": "web;IP=10.0.0.1"}, {}, 400),
        ("ContivCNI.AddPod", POD, {"kind": "text/plain"}, 415),
        ("ContivCNI.AddPod", POD, {"method": "PUT"}, 405),
        ("ContivCNI.DelPod", POD, {"method": "DELETE"}, 405),
        ("ContivCNI.UpdatePod", POD, {}, 404),
        ("", POD, {}, 404),
    ],
    ids=str,
)
async def test_an_invalid_call_is_rejected_before_anything_is_done(
    tmp_path: Path, action: str, body: object, options: dict[str, str], status: int
) -> None:
    handler = Handler()
    async with serving(handler, tmp_path / "contiv.sock") as call:
        answered, answer = await call(action, body, **options)
    assert answered == status
    assert set(answer) == {"code", "message", "field", "details"}
    assert handler.served == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"K8S_POD_INFRA_CONTAINER_ID": ""},
        {"K8S_POD_INFRA_CONTAINER_ID": "../x"},
        {"CNI_IFNAME": "eth0/.."},
        {"CNI_NETNS": "relative"},
        {"K8S_POD_NAME": "no name"},
    ],
    ids=str,
)
async def test_names_are_checked_as_in_cni(tmp_path: Path, wrong: dict[str, str]) -> None:
    handler = Handler()
    async with serving(handler, tmp_path / "contiv.sock") as call:
        status, answer = await call("ContivCNI.AddPod", POD | wrong)
    assert (status, answer["result"]) == (500, 1)
    assert handler.served == []
