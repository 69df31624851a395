"""Whatever is wrong with a NetworkPolicy, it never allows more than the readable one."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.adapters.kubernetes.policies import decode_policy
from weft.domain.errors import Invalid
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.model.identities import Namespace, Pod
from weft.domain.policy.model.protocols import TCP, UDP

ENDS = ("ns/web", "ns/db", "other/client", "198.51.100.7", "10.9.0.1")
FLOWS = [(TCP, 80), (TCP, 443), (UDP, 53)]
SPEC: dict[str, Any] = {
    "podSelector": {"matchLabels": {"app": "web"}},
    "policyTypes": ["Ingress", "Egress"],
    "ingress": [
        {"from": [{"podSelector": {"matchLabels": {"app": "db"}}}], "ports": [{"protocol": "TCP", "port": 80}]},
        {"from": [{"ipBlock": {"cidr": "198.51.100.0/24", "except": ["198.51.100.128/25"]}}]},
    ],
    "egress": [{"to": [{"namespaceSelector": {"matchLabels": {"team": "x"}}}], "ports": [{"port": 443}]}],
}
POLICY: dict[str, Any] = {"metadata": {"name": "p", "namespace": "ns", "uid": "1"}, "spec": SPEC}
# Values of a wrong type or syntax, none of which a selector, port, prefix or name may have.
GARBAGE = st.sampled_from([5, -1, True, "no such thing!", "/", ["x", 5], {"unknown": {}}, [[]], 1.5])


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all members below a value."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, member in members for found in ((*path, key), *paths(member, (*path, key)))]


def allowed(data: dict[str, Any]) -> set[tuple[str, str, int, int]]:
    """The flows that the policy allows."""
    pods = {"ns/web": "10.0.0.1", "ns/db": "10.0.0.2", "other/client": "10.0.0.3"}
    engine = Engine([Namespace(name="ns"), Namespace(name="other", labels={"team": "x"})])
    for key, address in pods.items():
        namespace, _, name = key.partition("/")
        engine.put(Pod(namespace=namespace, name=name, ips=(address,), labels={"app": name}))
    engine.put(decode_policy(msgspec.json.encode(data)).policy)
    return {
        (source, target, *flow)
        for source in ENDS
        for target in ENDS
        for flow in FLOWS
        if engine.verdict(engine.directory.flow(source, target, protocol=flow[0], port=flow[1])).allowed
    }


READABLE = allowed(POLICY)


@settings(deadline=None)
@given(
    path=st.sampled_from([*paths(SPEC, ("spec",)), ("metadata", "name"), ("metadata", "uid"), ("spec",)]), value=GARBAGE
)
def test_H9_a_mutated_policy_never_opens_traffic(path: tuple[Any, ...], value: Any) -> None:
    mutated = copy.deepcopy(POLICY)
    parent: Any = mutated
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    assert allowed(mutated) <= READABLE


@settings(deadline=None)
@given(path=st.sampled_from(paths(SPEC, ("spec",))), name=st.sampled_from(["unknown", "matchFields", "nodes"]))
def test_H9_an_unknown_member_never_opens_traffic(path: tuple[Any, ...], name: str) -> None:
    mutated = copy.deepcopy(POLICY)
    parent: Any = mutated
    for key in path:
        parent = parent[key]
    if isinstance(parent, dict) and path[-1] != "matchLabels":
        parent[name] = {"x": "y"}
    assert allowed(mutated) <= READABLE


def test_H9_without_a_namespace_no_pods_are_known() -> None:
    for namespace in (None, 5, "", "a/b"):
        try:
            decode_policy(msgspec.json.encode({"metadata": {"name": "p", "namespace": namespace}, "spec": SPEC}))
        except Invalid as error:
            assert error.field == "metadata.namespace"
        else:
            raise AssertionError(namespace)
