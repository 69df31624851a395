"""Discovery of netmaster by agents, and authentication of agents by netmaster.

A ConfigMap has netmaster's URLs and its CA; RBAC lets only netmaster write it. An agent sends the token that the
kubelet projected into its pod. A TokenReview returns the service account and, from Kubernetes 1.30 on, the pod's node.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from weft.adapters.kubernetes.api import ApiClient
from weft.adapters.kubernetes.reflector import decode_reply
from weft.domain.errors import Denied, NotFound
from weft.ports.orchestrator import NetmasterEndpoint

NAMESPACE = "kube-system"
CONFIG_MAP = f"/api/v1/namespaces/{NAMESPACE}/configmaps/weft-netmaster"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:weft-netplugin"
# Audience of the agents' tokens. The API server itself does not accept tokens with this audience.
AUDIENCE = "weft-netmaster"

_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
_NODE = "authentication.kubernetes.io/node-name"


class _ConfigMap(msgspec.Struct, frozen=True):
    data: Mapping[str, str] = {}


class _User(msgspec.Struct, frozen=True):
    username: str = ""
    extra: Mapping[str, tuple[str, ...]] = {}


class _ReviewStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    audiences: tuple[str, ...] = ()
    user: _User = _User()
    error: str = ""


class _TokenReview(msgspec.Struct, frozen=True):
    status: _ReviewStatus = _ReviewStatus()


_decode_config_map = msgspec.json.Decoder(_ConfigMap).decode
_decode_review = msgspec.json.Decoder(_TokenReview).decode


class KubeDiscovery(ApiClient):
    """See `weft.ports.orchestrator.Discovery`."""

    async def read(self) -> NetmasterEndpoint | None:
        try:
            data = decode_reply(_decode_config_map, await self._api.get(CONFIG_MAP)).data
        except NotFound:
            return None
        try:
            return NetmasterEndpoint(store=data["store"], join=data["join"], ca=data["ca.crt"])
        except KeyError:
            return None  # the manifest creates the ConfigMap empty; netmaster has not published yet

    async def publish(self, endpoint: NetmasterEndpoint) -> None:
        data = {"store": endpoint.store, "join": endpoint.join, "ca.crt": endpoint.ca}
        await self._api.merge_patch(CONFIG_MAP, msgspec.json.encode({"data": data}))

    async def review_token(self, token: str) -> str:
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }
        reply = await self._api.post(_REVIEWS, msgspec.json.encode(request))
        review = decode_reply(_decode_review, reply).status
        if not review.authenticated:
            raise Denied(f"the API server does not accept the token: {review.error[:200] or 'unknown token'}")
        # An authenticator that ignores audiences accepts any token and leaves them out of its reply.
        if AUDIENCE not in review.audiences:
            raise Denied(
                f"the token is not for {AUDIENCE}: join with the one that the kubelet mounts in the agent's pod"
            )
        if review.user.username != ACCOUNT:
            raise Denied(f"the token is {review.user.username}'s, and nodes join as {ACCOUNT}")
        nodes = review.user.extra.get(_NODE, ())
        # Only tokens bound to a running pod have this; `kubectl create token` makes others.
        if len(nodes) != 1:
            raise Denied("token not bound to a node: join with the one that the kubelet mounts in the agent's pod")
        return nodes[0]
