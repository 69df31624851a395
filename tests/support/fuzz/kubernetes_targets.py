"""Parsers of what an API server says: objects, lists, watches, errors, and policies in the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
from tests.support.fuzz.engine import Parse, Target
from tests.support.fuzz.inputs import finish
from tests.support.fuzz.mutations import Form

from weft.adapters.kubernetes import netmaster_discovery, reflector
from weft.adapters.kubernetes.api import Api, error_from_status
from weft.adapters.kubernetes.cluster_informers import NAMESPACES, POLICIES, SERVICES, SLICES, KindHandler
from weft.adapters.kubernetes.credentials import read_contiv_json, read_kubeconfig
from weft.adapters.kubernetes.pods import _decode_pod, pod_info
from weft.domain import codec, kinds
from weft.domain.errors import Invalid, Unavailable, WeftError
from weft.domain.policy.compile.kube_objects import KubePolicy
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.policymap.policy_map import PolicyMap
from weft.domain.validation import check

_META = {
    "name": "x",
    "namespace": "ns",
    "uid": "u",
    "resourceVersion": "7",
    "labels": {"kubernetes.io/service-name": "x", "k8s-app": "kube-dns"},
    "annotations": {"weft/shared": "true"},
}
_NAMESPACE = {"metadata": _META}
_POLICY = {
    "metadata": _META,
    "spec": {
        "podSelector": {
            "matchLabels": {"a": "b"},
            "matchExpressions": [{"key": "k", "operator": "In", "values": ["v"]}],
        },
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {
                "from": [
                    {"podSelector": {}, "namespaceSelector": {}},
                    {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
                ],
                "ports": [{"protocol": "TCP", "port": 80, "endPort": 90}, {"port": "http"}],
            }
        ],
        "egress": [{"to": [{"ipBlock": {"cidr": "fd00::/8"}}]}, {}],
    },
}
_SERVICE = {
    "metadata": _META,
    "spec": {
        "type": "LoadBalancer",
        "clusterIP": "10.96.0.1",
        "clusterIPs": ["10.96.0.1"],
        "externalIPs": ["192.0.2.9"],
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 5}},
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "nodePort": 30080, "targetPort": 80}],
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "externalName": "a.b",
        "healthCheckNodePort": 30000,
    },
    "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.8"}]}},
}
_SLICE = {
    "metadata": _META,
    "addressType": "IPv4",
    "ports": [{"name": "http", "protocol": "TCP", "port": 80}],
    "endpoints": [
        {
            "addresses": ["10.1.0.5"],
            "conditions": {"ready": True},
            "nodeName": "n1",
            "hostname": "h",
            "topology": {"kubernetes.io/hostname": "n1"},
        }
    ],
}
_ENDPOINTS = {
    "metadata": _META,
    "subsets": [
        {
            "addresses": [{"ip": "10.1.0.5", "nodeName": "n1"}],
            "notReadyAddresses": [{"ip": "10.1.0.6"}],
            "ports": [{"port": 80}],
        }
    ],
}
_POD = {
    "metadata": {**_META, "annotations": {"kubernetes.io/config.mirror": "u"}},
    "spec": {
        "containers": [{"ports": [{"name": "http", "protocol": "TCP", "containerPort": 80}]}],
        "initContainers": [],
    },
}
_RESOURCES = (
    (NAMESPACES, kinds.KUBE_NAMESPACE),
    (POLICIES, kinds.KUBE_POLICY),
    (SERVICES, kinds.KUBE_SERVICE),
    (SLICES, kinds.KUBE_SLICE),
)
_OBJECTS = (_NAMESPACE, _POLICY, _SERVICE, _SLICE, _ENDPOINTS, _POD)


def _json(*values: object) -> Callable[[], list[bytes]]:
    return lambda: [msgspec.json.encode(each) for each in values]


class _Handler:
    """What netmaster does first with an object of the API server: check it and encode it for the store."""

    def replace(self, kind: Any, objects: list[Any]) -> None:
        for value in objects:
            self.put(kind, value)

    def put(self, kind: Any, value: Any) -> None:
        try:
            check(value)
        except Invalid:
            return
        assert codec.decode(kind.type, codec.encode(value)) == value

    def remove(self, kind: Any, value: Any) -> None:
        kind.store_key(*kind.key_parts(value))


class _Api:
    """In place of `Api`: the first response is the input, and then the server is gone."""

    def __init__(self, data: bytes) -> None:
        self._data: bytes | None = data

    async def get(self, _path: str) -> bytes:
        data, self._data = self._data, None
        if data is None:
            raise Unavailable("the server is gone")
        return data

    async def post(self, path: str, _body: bytes) -> bytes:
        return await self.get(path)


def _reflectors(api: _Api) -> list[reflector.Reflector[Any]]:
    return [
        reflector.Reflector(cast("Api", api), [resource], KindHandler(cast("Any", kind), cast("Any", _Handler())))
        for resources, kind in _RESOURCES
        for resource in resources
    ]


def _list_objects(data: bytes) -> object:
    for each in _reflectors(_Api(data)):
        try:
            each._api = cast("Api", _Api(data))
            finish(each._list_pages())
        except WeftError:
            continue
    return None


def _watch_objects(data: bytes) -> object:
    for each in _reflectors(_Api(b"")):
        try:
            each._deliver(reflector.decode_reply(reflector._decode_event, data))
        except WeftError:
            continue
    return None


def _read_object(data: bytes) -> object:
    """An object inside of an event that is valid."""
    return _watch_objects(b'{"type":"MODIFIED","object":' + data + b"}")


def _read_pod(data: bytes) -> object:
    error_from_status(500, data)
    return pod_info(reflector.decode_reply(_decode_pod, data))


def _discover(data: bytes) -> object:
    client = netmaster_discovery.KubeDiscovery.__new__(netmaster_discovery.KubeDiscovery)
    for work in (lambda: finish(client.read()), lambda: finish(client.review_token("token"))):
        client._api = cast("Api", _Api(data))
        try:
            work()
        except WeftError:
            continue
    return None


_CONFIG_MAP = {"data": {"store": "https://10.0.0.1:9998", "join": "https://10.0.0.1:9997", "ca.crt": "x"}}
_REVIEW = {
    "status": {
        "authenticated": True,
        "audiences": ["weft-netmaster"],
        "error": "",
        "user": {
            "username": "system:serviceaccount:kube-system:weft",
            "extra": {"authentication.kubernetes.io/node-name": ["n1"]},
        },
    }
}


def _open_config(read: Callable[[Path], object]) -> Callable[[], Parse]:
    def make() -> Parse:
        file = Path(tempfile.mkdtemp(prefix="weft-fuzz-")) / "config"

        def parse(data: bytes) -> object:
            file.write_bytes(data)
            return read(file)

        return parse

    return make


_KUBECONFIG = {
    "current-context": "c",
    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
    "clusters": [{"name": "k", "cluster": {"server": "https://10.0.0.1", "certificate-authority-data": "eA=="}}],
    "users": [
        {"name": "u", "user": {"token": "t", "tokenFile": "f", "client-certificate": "c", "client-key-data": "eA=="}}
    ],
}
_CONTIV = {
    "K8S_API_SERVER": "https://10.0.0.1:6443",
    "K8S_CA": "/x",
    "K8S_CERT": "/c",
    "K8S_KEY": "/k",
    "K8S_TOKEN": "",
    "SVC_SUBNET": "10.96.0.0/12",
}


def _compile(data: bytes) -> object:
    """A NetworkPolicy of the store in the engine and in the map for datapaths, beside a valid pod."""
    document = codec.decode(KubePolicy, data)
    check(document)
    engine = Engine()
    engine.put(document.policy)
    return PolicyMap, engine


def _stored_policies() -> list[bytes]:
    return [b'{"v":1,"o":{"namespace":"ns","name":"x","uid":"u","spec":' + msgspec.json.encode(_POLICY["spec"]) + b"}}"]


TARGETS = (
    Target(
        name="kube-object", open=lambda: _read_object, samples=_json(*_OBJECTS), errors=(), form=Form.JSON, weight=1.5
    ),
    Target(
        name="kube-watch",
        open=lambda: _watch_objects,
        errors=(),
        form=Form.JSON,
        weight=0.5,
        samples=_json(
            *({"type": kind, "object": each} for kind in ("ADDED", "DELETED", "BOOKMARK") for each in _OBJECTS),
            {"type": "ERROR", "object": {"code": 410, "message": "too old", "reason": "Expired"}},
        ),
    ),
    Target(
        name="kube-list",
        open=lambda: _list_objects,
        errors=(),
        form=Form.JSON,
        weight=0.5,
        samples=_json(
            *(
                {"metadata": {"resourceVersion": "5", "continue": token}, "items": [each, each]}
                for each in _OBJECTS
                for token in ("", "more")
            )
        ),
    ),
    Target(
        name="kube-pod",
        open=lambda: _read_pod,
        samples=_json(_POD, {"code": 404, "message": "gone"}),
        errors=(WeftError,),
        form=Form.JSON,
        weight=0.5,
    ),
    Target(
        name="kube-discovery",
        open=lambda: _discover,
        samples=_json(_CONFIG_MAP, _REVIEW),
        errors=(),
        form=Form.JSON,
        weight=0.3,
    ),
    Target(
        name="kubeconfig",
        open=_open_config(read_kubeconfig),
        samples=_json(_KUBECONFIG),
        errors=(Invalid,),
        form=Form.JSON,
        weight=0.05,
    ),
    Target(
        name="contiv-json",
        open=_open_config(read_contiv_json),
        samples=_json(_CONTIV),
        errors=(Invalid,),
        form=Form.JSON,
        weight=0.2,
    ),
    Target(
        name="kube-policy-compiled",
        open=lambda: _compile,
        samples=_stored_policies,
        errors=(WeftError,),
        form=Form.JSON,
        weight=0.5,
    ),
)
