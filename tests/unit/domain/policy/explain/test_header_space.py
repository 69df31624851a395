"""Cells: they cover everything once, and no rule cuts through one."""

from __future__ import annotations

from random import Random

import pytest
from tests.support.cluster_samples import random_cluster

from weft.domain.addresses import Address
from weft.domain.model import PodPort
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.explain.header_space import (
    AddressCells,
    ServiceCell,
    overlay,
    portless_protocols,
    service_cells,
    service_texts,
)
from weft.domain.policy.model.rules import FlowRule


def rules_of(seed: int) -> list[FlowRule]:
    return [rule for unit in Engine(random_cluster(Random(seed))).units.values() for rule in unit.rules]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("version", [4, 6])
def test_every_port_is_in_one_cell_and_no_rule_cuts_it(seed: int, version: int) -> None:
    rules = rules_of(seed)
    portless = portless_protocols(rules)
    cells = service_cells(rules, ports=[PodPort("http", 6, 8080)], portless=portless, version=version)
    for protocol in (6, 17, 132):
        ports = [port for cell in cells if cell.protocol == protocol for port in range(cell.first, cell.last + 1)]
        assert ports == list(range(1, 65536))
    assert (8080, 8080) in [(cell.first, cell.last) for cell in cells if cell.protocol == 6]
    for rule in rules:
        for service in rule.services or ():
            for cell in cells:
                if cell.protocol in service.protocols and not service.name:
                    inside = service.first <= cell.first and cell.last <= service.last
                    assert inside or cell.last < service.first or service.last < cell.first
    assert len({cell.protocol for cell in cells}) == len(portless | {6, 17, 132, 1, 99})


@pytest.mark.parametrize("seed", range(10))
def test_an_overlay_has_every_cut_of_both(seed: int) -> None:
    rules = rules_of(seed)
    portless = portless_protocols(rules)
    half = len(rules) // 2
    left, right = (service_cells(part, ports=(), portless=portless, version=4) for part in (rules[:half], rules[half:]))
    pieces = list(overlay([(cell, cell) for cell in left], [(cell, cell) for cell in right]))
    assert [piece for piece, _, _ in pieces] == service_cells(rules, ports=(), portless=portless, version=4)
    for piece, one, other in pieces:
        for cell in (one, other):
            assert cell.protocol == piece.protocol
            assert cell.first <= piece.first <= piece.last <= cell.last


def test_services_in_words() -> None:
    cells = [
        ServiceCell("icmp", 1, 0, 0),
        ServiceCell("tcp", 6, 1, 79),
        ServiceCell("tcp", 6, 80, 80),
        ServiceCell("tcp", 6, 443, 443),
        ServiceCell("udp", 17, 1, 65535),
        ServiceCell("other protocols", 255, 0, 0),
    ]
    assert service_texts(cells) == ("icmp", "tcp/1-80", "tcp/443", "udp", "other protocols")


@pytest.mark.parametrize("seed", range(10))
def test_addresses_of_a_cell_are_in_the_same_sets(seed: int) -> None:
    rng = Random(seed)
    units = Engine(random_cluster(rng)).units.values()
    sets = [peer.addresses for unit in units for peer in unit.peers() if peer.addresses is not None]
    cells = AddressCells(sets)
    for version, bits in ((4, 32), (6, 128)):
        spans = cells.cells(version)
        assert (spans[0].first, spans[-1].last) == (0, (1 << bits) - 1)
        for span in spans:
            ends = Address(version, span.first), Address(version, span.last)
            assert cells.cell_of(ends[0]) == cells.cell_of(ends[1])
            assert all((ends[0] in each) is (ends[1] in each) for each in sets)
        assert len({cells.cell_of(Address(version, span.first)) for span in spans}) == len(spans)
