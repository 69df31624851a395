"""Contiv's own way to attach pods (contiv 8.2): JSON over HTTP on a unix socket, for callers that are not rewritten.

The same use cases as CNI, and the same checks: a call becomes the CNI request that it stands for.
"""

from __future__ import annotations

import asyncio
from time import perf_counter

import msgspec
from aiohttp import web

from weft.agent.cni.inflight_requests import Serve
from weft.agent.cni.server import Observe, cni_error, read_request
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Handle
from weft.cni.errors import CniError, Code
from weft.cni.request import Verb
from weft.domain.errors import Denied, Malformed, WeftError
from weft.ports.datapath import InterfaceAddress
from weft.runtime.http import JSON_TYPE, MAX_BODY, errors_as_json, json_response
from weft.runtime.logs import Log
from weft.runtime.unix import check_caller

log = Log("contiv-cni")

# How long a call may take: callers of this form name no deadline.
WITHIN_S = 60.0

_CONFIG = b'{"cniVersion":"1.0.0","name":"contiv-net","type":"contivk8s"}'
_USUAL_INTERFACE = "eth0"


class Pod(msgspec.Struct, frozen=True):
    """What a caller says of a pod."""

    name: str = msgspec.field(name="K8S_POD_NAME", default="")
    namespace: str = msgspec.field(name="K8S_POD_NAMESPACE", default="")
    container: str = msgspec.field(name="K8S_POD_INFRA_CONTAINER_ID", default="")
    netns: str = msgspec.field(name="CNI_NETNS", default="")
    interface: str = msgspec.field(name="CNI_IFNAME", default=_USUAL_INTERFACE)


class PodAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a caller is told; `result` is 0, and left out, when all went well."""

    result: int = 0
    endpointid: str = ""
    ipaddress: str = ""
    ipv6address: str = ""
    errmsg: str = ""
    errinfo: str = ""


class ContivCni:
    """The two actions."""

    def __init__(self, *, journal: AttachmentStore, serve: Serve, observe: Observe) -> None:
        self._journal = journal
        self._serve = serve
        self._observe = observe

    def app(self) -> web.Application:
        app = web.Application(middlewares=[errors_as_json], client_max_size=MAX_BODY)
        app.router.add_post("/ContivCNI.AddPod", self._add)
        app.router.add_post("/ContivCNI.DelPod", self._delete)
        return app

    async def _add(self, request: web.Request) -> web.Response:
        pod = await _read_pod(request)
        if (refusal := await self._carry_out(Verb.ADD, pod)) is not None:
            return _refused(refusal)
        note = self._journal.find(Handle(pod.container, pod.interface))
        if note is None:
            return _refused(CniError(Code.FAILED, "the pod was taken off again meanwhile"))
        return json_response(_attached(note))

    async def _delete(self, request: web.Request) -> web.Response:
        pod = await _read_pod(request)
        refusal = await self._carry_out(Verb.DEL, pod)
        return json_response(PodAnswer()) if refusal is None else _refused(refusal)

    async def _carry_out(self, verb: Verb, pod: Pod) -> CniError | None:
        """Do what the verb says; why it could not be done, or None."""
        began = perf_counter()
        refusal: CniError | None = None
        try:
            async with asyncio.timeout(WITHIN_S):
                await self._serve(read_request(_environment(verb, pod), _CONFIG))
        except CniError as error:
            refusal = error
        except WeftError as error:
            refusal = cni_error(error)
        except TimeoutError:
            refusal = CniError(Code.TRY_LATER, "the agent did not finish in time: try again")
        took = perf_counter() - began
        self._observe(verb, str(int(refusal.code)) if refusal else "done", took)
        log.info(
            "contiv call",
            command=str(verb),
            container=pod.container[:64],
            outcome=refusal.message if refusal else "done",
            took_ms=round(took * 1000, 1),
        )
        return refusal


async def _read_pod(request: web.Request) -> Pod:
    peer = request.transport.get_extra_info("socket") if request.transport else None
    if peer is None:
        raise Denied("the connection is closed")
    check_caller(peer)
    if request.content_type != JSON_TYPE:
        raise web.HTTPUnsupportedMediaType(reason=f"send {JSON_TYPE}")
    try:
        pod = msgspec.json.decode(await request.read(), type=Pod)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"the body is not a pod: {error}") from error
    for text in (pod.name, pod.namespace, pod.container):
        if ";" in text or "=" in text:
            raise Malformed(f"{text[:80]!r} is not the name of a pod, a namespace or a container")
    return pod


def _environment(verb: Verb, pod: Pod) -> dict[str, str]:
    """The environment by which CNI says the same."""
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


def _attached(note: Attachment) -> PodAnswer:
    wired = note.wiring.addresses if note.wiring else ()
    return PodAnswer(endpointid=note.endpoint.endpoint_id, ipaddress=_address(wired, 4), ipv6address=_address(wired, 6))


def _address(wired: tuple[InterfaceAddress, ...], family: int) -> str:
    return next((f"{each.address}/{each.length}" for each in wired if each.address.family == family), "")


def _refused(refusal: CniError) -> web.Response:
    """Contiv's callers know one status for all that fails."""
    return json_response(PodAnswer(result=1, errmsg=refusal.message, errinfo=refusal.details), status=500)
