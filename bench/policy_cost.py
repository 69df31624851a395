"""The CPU time of one costly NetworkPolicy, from its document to the state items of a datapath."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from bench.figures import Figure, figure
from weft.domain.ids import NodeName, TenantName
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.model.identities import Namespace, Pod
from weft.domain.policy.model.netpol import read_network_policy
from weft.domain.policy.policymap.policy_map import PolicyMap

RULES, CIDRS, ROUNDS, PODS = 500, 30_000, 5, 20
NODE = NodeName("node-1")
Rules = list[dict[str, Any]]


def measure() -> dict[str, Figure]:
    cases: dict[str, tuple[Callable[[int], Rules], int, float, str]] = {
        f"{RULES} overlapping rules": (
            nested_rules,
            RULES,
            0.5,
            "nested port ranges, all addresses but one prefix each",
        ),
        f"{RULES} staggered rules": (
            staggered_rules,
            RULES,
            0.5,
            "as before, with 200,000 entries: each range is visible",
        ),
        f"{CIDRS} CIDRs in one rule": (one_rule, CIDRS, 2.0, "disjoint ipBlocks"),
        f"{CIDRS} CIDRs excepted": (one_exception, CIDRS, 2.0, "one ipBlock"),
    }
    figures = {}
    for name, (make, count, target, what) in cases.items():
        took = median(cpu_seconds(make(count)) for _ in range(ROUNDS))
        tenth = median(cpu_seconds(make(count // 10)) for _ in range(ROUNDS))
        note = f"CPU time, {what}, {PODS} pods; peer: ten times that of a tenth, which is linear growth"
        figures[f"policy of {name}"] = figure(took, peer=10 * tenth, unit="s", target=target, note=note)
    return figures


def nested_rules(count: int) -> Rules:
    return [
        {
            "from": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": [f"172.{16 + (i >> 8)}.{i & 255}.0/24"]}}],
            "ports": [{"protocol": "TCP", "port": 1000 + i, "endPort": 1000 + 2 * count - i}],
        }
        for i in range(count)
    ]


def staggered_rules(count: int) -> Rules:
    """The same with port ranges of which none hides another, so that the entries are the square of the rules."""
    return [
        rule | {"ports": [{"protocol": "TCP", "port": 1000 + i, "endPort": 1000 + count + i}]}
        for i, rule in enumerate(nested_rules(count))
    ]


def one_rule(count: int) -> Rules:
    return [{"from": [{"ipBlock": {"cidr": f"{prefix(i)}.0/25"}} for i in range(count)]}]


def one_exception(count: int) -> Rules:
    return [{"from": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": [f"{prefix(i)}.0/25" for i in range(count)]}}]}]


def prefix(index: int) -> str:
    return f"100.{index >> 8}.{index & 255}"


def cpu_seconds(rules: Rules) -> float:
    pods = [Pod(namespace="ns", name=f"pod-{i}", ips=(f"10.0.0.{i}",), node=NODE) for i in range(1, PODS + 1)]
    engine = Engine([Namespace(name="ns"), *pods])
    policy_map = PolicyMap(engine, tenant=TenantName("default"), node=NODE)
    policy_map.refresh()
    spec = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": rules}
    document = {"metadata": {"name": "p", "namespace": "ns"}, "spec": spec}
    start = time.process_time()
    policy_map.note(engine.put(read_network_policy(document)))
    policy_map.refresh()
    return time.process_time() - start
