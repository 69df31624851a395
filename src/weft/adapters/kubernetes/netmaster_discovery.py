"""Where netmaster and agents find each other in a cluster, and how netmaster knows an agent.

A ConfigMap says where netmaster is and by which authority it is known; only netmaster may write it. An agent shows the
token that its kubelet gave to its pod: the API server says whose it is, and on which node that pod is (1.30 and newer).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from weft.adapters.kubernetes.api import ApiClient
from weft.domain.errors import Denied, NotFound
from weft.ports.orchestrator import NetmasterEndpoint

NAMESPACE = "kube-system"
CONFIG_MAP = f"/api/v1/namespaces/{NAMESPACE}/configmaps/weft-netmaster"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:weft-netplugin"
# What agents' tokens are good for: at the API server itself they are worth nothing.
AUDIENCE = "weft-netmaster"

_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
_NODE = "authentication.kubernetes.io/node-name"


class _ConfigMap(msgspec.Struct, frozen=True):
    data: Mapping[str, str] = {}


class _User(msgspec.Struct, frozen=True):
    username: str = ""
    extra: Mapping[str, tuple[str, ...]] = {}


class _Verdict(msgspec.Struct, frozen=True):
    authenticated: bool = False
    audiences: tuple[str, ...] = ()
    user: _User = _User()
    error: str = ""


class _Review(msgspec.Struct, frozen=True):
    status: _Verdict = _Verdict()


class ClusterMeeting(ApiClient):
    """See `weft.ports.orchestrator.Discovery`."""

    async def read(self) -> NetmasterEndpoint | None:
        try:
            data = msgspec.json.decode(await self._api.get(CONFIG_MAP), type=_ConfigMap).data
        except NotFound:
            return None
        try:
            return NetmasterEndpoint(store=data["store"], join=data["join"], ca=data["ca.crt"])
        except KeyError:
            return None  # netmaster has not been there yet

    async def publish(self, notice: NetmasterEndpoint) -> None:
        data = {"store": notice.store, "join": notice.join, "ca.crt": notice.ca}
        await self._api.merge(CONFIG_MAP, msgspec.json.encode({"data": data}))

    async def node_of(self, token: str) -> str:
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }
        told = msgspec.json.decode(await self._api.post(_REVIEWS, msgspec.json.encode(asked)), type=_Review).status
        if not told.authenticated:
            raise Denied(f"the API server does not accept the token: {told.error[:200] or 'it is nobody’s'}")
        if AUDIENCE not in told.audiences:  # who knows nothing of audiences says nothing of them, and accepts any
            raise Denied(
                f"the token is not for {AUDIENCE}: join with the one that the kubelet hands to the agent's pod"
            )
        if told.user.username != ACCOUNT:
            raise Denied(f"the token is {told.user.username}'s, and nodes join as {ACCOUNT}")
        nodes = told.user.extra.get(_NODE, ())
        if len(nodes) != 1:
            raise Denied(
                "the token is of no pod on a node: join with the one that the kubelet hands to the agent's pod"
            )
        return nodes[0]
