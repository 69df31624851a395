"""The bound on the cost of one policy.

A policy cuts the header space into cells: a range of addresses that its rules tell apart, and in it a range of ports
of each rule that matches these addresses. Every cell costs time and memory on every node. The cells are counted before
any of them is made, in one pass over the ends of the ranges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from weft.domain.errors import Invalid
from weft.domain.policy.compile.kubernetes import compile_closed, compile_network_policy
from weft.domain.policy.model.netpol import IngressRule, NetworkPolicy, PolicySpec
from weft.domain.policy.model.rules import CompiledPolicy, Direction, FlowRule

# 500 rules that all overlap, each with exceptions of its own, have half as many. A node computes a million in a few
# seconds, and takes about 200 MB for them.
MAX_CELLS = 1_000_000


# Up to these many rules, ipBlocks and exceptions a policy compiles in about 10 ms.
QUICK_SIZE = 1000


def size_of(spec: PolicySpec) -> int:
    """How many rules, peers and exceptions a policy has; the time to compile it is in proportion."""
    size = 0
    for rules in (spec.ingress or (), spec.egress or ()):
        for rule in rules:
            peers = (rule.from_ if isinstance(rule, IngressRule) else rule.to) or ()
            size += 1 + len(peers) + sum(len(peer.ip_block.except_ or ()) for peer in peers if peer.ip_block)
    return size


def compile_bounded(policy: NetworkPolicy) -> CompiledPolicy:
    """The compiled policy; one that fails closed if it cannot be compiled, or is past the bound."""
    try:
        compiled = compile_network_policy(policy)
    except Invalid:
        return compile_closed(policy)
    return compile_closed(policy) if excess_of_compiled(compiled) else compiled


def excess_of(policy: NetworkPolicy) -> str:
    """Why a valid policy is too costly to be computed; empty if it is not."""
    return excess_of_compiled(compile_network_policy(policy))


def excess_of_compiled(policy: CompiledPolicy) -> str:
    cells = sum(count_cells(rule for rule in policy.rules if rule.direction is direction) for direction in Direction)
    if cells <= MAX_CELLS:
        return ""
    return (
        f"{policy.id} tells {cells} combinations of addresses, ports and rules apart, the limit is {MAX_CELLS}: "
        "split it, or let its ipBlocks overlap less"
    )


def count_cells(rules: Iterable[FlowRule]) -> int:
    """How many combinations of an address range, a rule that matches it, and a port range of that rule there are."""
    cells = 0
    # By family and address: how many port ranges begin to matter there, less those that end.
    steps: defaultdict[tuple[int, int], int] = defaultdict(int)
    for rule in rules:
        ports = max(len(rule.services or ()), 1)
        cells += ports
        for peer in rule.peers or ():
            for span in peer.addresses.ranges if peer.addresses else ():
                steps[span.family, span.first] += ports
                steps[span.family, span.last + 1] -= ports
    depth = 0
    for edge in sorted(steps):
        depth += steps[edge]
        cells += depth
    return cells
