"""Contiv's CNI protocol (contiv 8.2): JSON over HTTP on a unix socket, for callers written for Contiv's netplugin.

A call becomes the CNI request that it stands for, and passes the same checks.
"""

from __future__ import annotations

import asyncio
from time import perf_counter

import msgspec
from aiohttp import web

from weft.agent.cni.attachments import PRIMARY_INTERFACE
from weft.agent.cni.server import Observe, Serve, cni_error, read_request
from weft.agent.store.attachment_store import Attachment, AttachmentStore
from weft.cni.errors import CniError, Code
from weft.cni.request import AttachmentId, Verb
from weft.domain.codec import UNDECODABLE
from weft.domain.errors import Denied, Malformed, WeftError
from weft.ports.datapath import InterfaceAddress
from weft.runtime.admission import Guard
from weft.runtime.http import JSON_TYPE, MAX_BODY, errors_as_json, json_response
from weft.runtime.logs import Log
from weft.runtime.unix import check_caller

log = Log("contiv-cni")

# How long a call may take: the protocol has no field for a deadline.
WITHIN_S = 60.0

# Contiv's protocol has no network configuration: every call is one to this network.
_CONFIG = b'{"cniVersion":"1.0.0","name":"contiv-net","type":"contivk8s"}'


class Pod(msgspec.Struct, frozen=True):
    """The body of both calls."""

    name: str = msgspec.field(name="K8S_POD_NAME", default="")
    namespace: str = msgspec.field(name="K8S_POD_NAMESPACE", default="")
    container: str = msgspec.field(name="K8S_POD_INFRA_CONTAINER_ID", default="")
    netns: str = msgspec.field(name="CNI_NETNS", default="")
    interface: str = msgspec.field(name="CNI_IFNAME", default=PRIMARY_INTERFACE)


class PodAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer; `result` is 0, and left out, on success."""

    result: int = 0
    endpointid: str = ""
    ipaddress: str = ""
    ipv6address: str = ""
    errmsg: str = ""
    errinfo: str = ""


class ContivCni:
    """The routes AddPod and DelPod."""

    def __init__(self, *, attachment_store: AttachmentStore, serve: Serve, observe: Observe) -> None:
        self._attachment_store = attachment_store
        self._serve = serve
        self._observe = observe

    def app(self, guard: Guard) -> web.Application:
        app = web.Application(middlewares=[errors_as_json, guard.middleware()], client_max_size=MAX_BODY)
        app.router.add_post("/ContivCNI.AddPod", self._add)
        app.router.add_post("/ContivCNI.DelPod", self._delete)
        return app

    async def _add(self, request: web.Request) -> web.Response:
        pod = await _read_pod(request)
        if (failure := await self._serve_verb(Verb.ADD, pod)) is not None:
            return _failed(failure)
        attachment = self._attachment_store.find(AttachmentId(pod.container, pod.interface))
        if attachment is None:  # its DEL may come as soon as its ADD is done
            return _failed(CniError(Code.FAILED, "the pod was removed again"))
        return json_response(_attached(attachment))

    async def _delete(self, request: web.Request) -> web.Response:
        pod = await _read_pod(request)
        failure = await self._serve_verb(Verb.DEL, pod)
        return json_response(PodAnswer()) if failure is None else _failed(failure)

    async def _serve_verb(self, verb: Verb, pod: Pod) -> CniError | None:
        """Serve the CNI request of a verb; its error, or None on success."""
        began = perf_counter()
        failure: CniError | None = None
        try:
            async with asyncio.timeout(WITHIN_S):
                await self._serve(read_request(_environment(verb, pod), _CONFIG))
        except CniError as error:
            failure = error
        except WeftError as error:
            failure = cni_error(error)
        except TimeoutError:
            failure = CniError(Code.TRY_LATER, "the agent did not finish in time: try again")
        took = perf_counter() - began
        self._observe(verb, str(int(failure.code)) if failure else "done", took)
        log.info(
            "contiv call",
            command=str(verb),
            container=pod.container[:64],
            outcome=failure.message if failure else "done",
            took_ms=round(took * 1000, 1),
        )
        return failure


async def _read_pod(request: web.Request) -> Pod:
    peer = request.transport.get_extra_info("socket") if request.transport else None
    if peer is None:
        raise Denied("the connection is closed")
    # The socket is root's already; this holds even if somebody changes its mode.
    check_caller(peer)
    if request.content_type != JSON_TYPE:
        raise web.HTTPUnsupportedMediaType(reason=f"send {JSON_TYPE}")
    try:
        pod = msgspec.json.decode(await request.read(), type=Pod)
    except UNDECODABLE as error:
        raise Malformed(f"the body is not a pod: {error}") from error
    # These characters separate the pairs of CNI_ARGS, into which the names go.
    for text in (pod.name, pod.namespace, pod.container):
        if ";" in text or "=" in text:
            raise Malformed(f"{text[:80]!r} is not the name of a pod, a namespace or a container")
    return pod


def _environment(verb: Verb, pod: Pod) -> dict[str, str]:
    """The CNI environment of the call."""
    arguments = {
        "IgnoreUnknown": "1",
        "K8S_POD_NAMESPACE": pod.namespace,
        "K8S_POD_NAME": pod.name,
        "K8S_POD_INFRA_CONTAINER_ID": pod.container,
    }
    return {
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": pod.container,
        "CNI_NETNS": pod.netns,
        "CNI_IFNAME": pod.interface,
        "CNI_ARGS": ";".join(f"{name}={value}" for name, value in arguments.items()),
    }


def _attached(attachment: Attachment) -> PodAnswer:
    addresses = attachment.config.addresses if attachment.config else ()
    return PodAnswer(
        endpointid=attachment.endpoint.endpoint_id,
        ipaddress=_address(addresses, 4),
        ipv6address=_address(addresses, 6),
    )


def _address(addresses: tuple[InterfaceAddress, ...], family: int) -> str:
    return next((f"{each.address}/{each.length}" for each in addresses if each.address.family == family), "")


def _failed(error: CniError) -> web.Response:
    """Contiv's callers know one status for every failure."""
    return json_response(PodAnswer(result=1, errmsg=error.message, errinfo=error.details), status=500)
