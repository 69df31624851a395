"""Equivalence classes partition the header space, and no rule splits one."""

from __future__ import annotations

from random import Random

import pytest
from tests.support.cluster_samples import random_cluster

from weft.domain.addresses import Address
from weft.domain.model import PodPort
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.explain.header_space import (
    AddressClasses,
    L4Class,
    common_refinement,
    format_l4_classes,
    l4_classes,
    portless_protocols,
)
from weft.domain.policy.model.rules import FlowRule


def rules_of(seed: int) -> list[FlowRule]:
    return [rule for policy in Engine(random_cluster(Random(seed))).policies.values() for rule in policy.rules]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("version", [4, 6])
def test_every_port_is_in_one_class_and_no_rule_splits_it(seed: int, version: int) -> None:
    rules = rules_of(seed)
    portless = portless_protocols(rules)
    classes = l4_classes(rules, ports=[PodPort("http", 6, 8080)], portless=portless, version=version)
    for protocol in (6, 17, 132):
        ports = [
            port
            for l4_class in classes
            if l4_class.protocol == protocol
            for port in range(l4_class.first, l4_class.last + 1)
        ]
        assert ports == list(range(1, 65536))
    assert (8080, 8080) in [(l4_class.first, l4_class.last) for l4_class in classes if l4_class.protocol == 6]
    for rule in rules:
        for service in rule.services or ():
            for l4_class in classes:
                if l4_class.protocol in service.protocols and not service.name:
                    inside = service.first <= l4_class.first and l4_class.last <= service.last
                    assert inside or l4_class.last < service.first or service.last < l4_class.first
    assert len({l4_class.protocol for l4_class in classes}) == len(portless | {6, 17, 132, 1, 99})


@pytest.mark.parametrize("seed", range(10))
def test_the_common_refinement_has_every_cut_of_both_partitions(seed: int) -> None:
    rules = rules_of(seed)
    portless = portless_protocols(rules)
    half = len(rules) // 2
    left, right = (l4_classes(part, ports=(), portless=portless, version=4) for part in (rules[:half], rules[half:]))
    pieces = list(
        common_refinement([(l4_class, l4_class) for l4_class in left], [(l4_class, l4_class) for l4_class in right])
    )
    assert [piece for piece, _, _ in pieces] == l4_classes(rules, ports=(), portless=portless, version=4)
    for piece, one, other in pieces:
        for l4_class in (one, other):
            assert l4_class.protocol == piece.protocol
            assert l4_class.first <= piece.first <= piece.last <= l4_class.last


def test_adjacent_classes_are_formatted_as_one() -> None:
    classes = [
        L4Class("icmp", 1, 0, 0),
        L4Class("tcp", 6, 1, 79),
        L4Class("tcp", 6, 80, 80),
        L4Class("tcp", 6, 443, 443),
        L4Class("udp", 17, 1, 65535),
        L4Class("other protocols", 255, 0, 0),
    ]
    assert format_l4_classes(classes) == ("icmp", "tcp/1-80", "tcp/443", "udp", "other protocols")


@pytest.mark.parametrize("seed", range(10))
def test_addresses_of_one_class_are_in_the_same_sets(seed: int) -> None:
    rng = Random(seed)
    policies = Engine(random_cluster(rng)).policies.values()
    sets = [peer.addresses for policy in policies for peer in policy.peers() if peer.addresses is not None]
    address_classes = AddressClasses(sets)
    for version, bits in ((4, 32), (6, 128)):
        spans = address_classes.ranges(version)
        assert (spans[0].first, spans[-1].last) == (0, (1 << bits) - 1)
        for span in spans:
            ends = Address(version, span.first), Address(version, span.last)
            assert address_classes.class_of(ends[0]) == address_classes.class_of(ends[1])
            assert all((ends[0] in each) is (ends[1] in each) for each in sets)
        assert len({address_classes.class_of(Address(version, span.first)) for span in spans}) == len(spans)
