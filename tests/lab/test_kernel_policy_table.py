"""The table of a space through its life: read back, tampered with, restarted, and filled to the brim."""

from __future__ import annotations

import itertools
import random
import re
import select
import socket
import subprocess

import pytest
from tests.support.modes import BRIDGE_IN_SOAK
from tests.support.policy_testbed import TENANT, PolicyTestbed, row, tallies_of

from weft.adapters.netns.nft.entries import Entry
from weft.adapters.netns.nft.policy_maps import entries_of
from weft.domain.addresses import Address, Range
from weft.domain.desired.diff import Difference
from weft.domain.policy.model.protocols import TCP, UDP
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import (
    VERDICT_DENY,
    WORKLOAD,
    CidrIdentity,
    IpIdentity,
    PolicyEntry,
    PolicyPart,
    VerdictCounter,
)
from weft.lab.waiting import DEADLINE

pytestmark = BRIDGE_IN_SOAK

ALLOW, DENY = 0x111, VERDICT_DENY | 0x222
PORT = 8080


def nft(ward: PolicyTestbed, command: str) -> None:
    ward.space.namespace.run(lambda: subprocess.run(["nft", command], check=True, timeout=DEADLINE))


def policy_entries(ward: PolicyTestbed) -> set[Entry]:
    return {entry for entry in ward.space.table.read() if not entry.name.startswith(("ports", "segments"))}


def entries(parts: set[PolicyPart]) -> set[Entry]:
    return {entry for part in parts for entry in entries_of(part)}


def some_parts(chance: random.Random) -> set[PolicyPart]:
    """Parts of every form that may be there together."""
    parts: set[PolicyPart] = set()
    for family, top in ((4, (1 << 32) - 1), (6, (1 << 128) - 1)):
        for base in (0, top // 3, top - 40):
            cuts = sorted(chance.sample(range(42), chance.randint(2, 8)))
            for first, after in itertools.pairwise(cuts):
                if chance.random() < 0.7:
                    parts.add(CidrIdentity(TENANT, Range(family, base + first, base + after - 1), chance.randint(1, 3)))
        for number in chance.sample(range(20), 8):
            parts.add(IpIdentity(TENANT, Address(family, number), WORKLOAD | chance.randint(1, 3)))
    for direction in Direction:
        for remote in (None, 1, 2):
            local = WORKLOAD | chance.randint(1, 3)
            outcome = chance.choice((ALLOW, DENY))
            parts.add(PolicyEntry(TENANT, direction, local, remote, outcome))
            parts.add(PolicyEntry(TENANT, direction, local, remote, outcome, chance.choice((TCP, UDP))))
            for port in chance.sample(range(100), 3):
                ports = (port * 600, port * 600 + chance.choice((0, 1, 599)))
                parts.add(PolicyEntry(TENANT, direction, local, remote, outcome, TCP, ports))
    return parts | set(tallies_of(list(parts)))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_applied_step_by_step_is_read_back(ward: PolicyTestbed, seed: int) -> None:
    chance = random.Random(seed)
    there: set[PolicyPart] = set()
    for _ in range(20):
        wanted = some_parts(chance)
        ward.datapath.apply(Difference(tuple(wanted - there), tuple(there - wanted)))
        assert policy_entries(ward) == entries(wanted)
        there = wanted


def test_converge_makes_any_policy_of_any_other(ward: PolicyTestbed) -> None:
    chance = random.Random(7)
    for _ in range(10):
        wanted = some_parts(chance)
        everything = ward.parts([], tuple(wanted))
        assert ward.datapath.converge(everything).repaired
        assert policy_entries(ward) == entries(wanted)
        assert ward.datapath.converge(everything).repaired == ()


def test_a_change_is_made_also_where_others_have_made_half_of_it(ward: PolicyTestbed) -> None:
    """What is gone already is dropped, and what has another value gets the one that is wanted."""
    address = Address(4, 0x0A000063)
    old, new = IpIdentity(TENANT, address, 5), IpIdentity(TENANT, address, 6)
    other = VerdictCounter(TENANT, ALLOW)
    ward.put(old, other)
    nft(ward, "delete element inet weft who_asks4 { 10.0.0.99 }")
    ward.datapath.apply(Difference((new,), (old, other)))
    assert policy_entries(ward) == entries({new})
    ward.datapath.apply(Difference((old,), ()))
    assert policy_entries(ward) == entries({old})


TAMPERINGS = {
    "everything flushed": "flush ruleset",
    "the table deleted": "delete table inet weft",
    "the rules flushed": "flush table inet weft",
    "a door opened": "insert rule inet weft forward accept",
    "a chain taken": "flush chain inet weft stamp",
    "a map emptied": "flush map inet weft ingress_any_all",
    "an element added": "add element inet weft ports4 { wp1 . 0x02020a000001 . 10.0.0.77 }",
    "the policy of a hook changed": "chain inet weft forward { policy accept; }",
    "another table in its place": (
        "delete table inet weft; table inet weft { map who_asks4 { type inet_service : mark; }; chain refuse { }; }"
    ),
}


@pytest.mark.parametrize("tampering", ["everything flushed", "the table deleted", "the rules flushed"])
@pytest.mark.parametrize("family", [4, 6])
def test_nothing_passes_until_it_is_mended(ward: PolicyTestbed, fwdmode: str, tampering: str, family: int) -> None:
    """Fail closed, though nothing of ours is there that could refuse: the kernel itself does not forward it."""
    if fwdmode == "bridge":
        pytest.skip("a bridge goes on carrying frames within its network")
    one, two = ward.pod(1), ward.pod(2)
    wanted = ward.parts([one, two])
    assert ward.ask(one, two, UDP, PORT, family=family) == 0
    with (
        two.open_socket(family, socket.SOCK_DGRAM, port=PORT) as ear,
        one.open_socket(family, socket.SOCK_DGRAM) as mouth,
    ):
        nft(ward, TAMPERINGS[tampering])
        mouth.sendto(b"meanwhile", ear.getsockname()[:2])
        ward.datapath.converge(wanted)
        mouth.sendto(b"afterwards", ear.getsockname()[:2])
        assert ward.fate(ear, one.address(family)) == 0
        assert ear.recv(64) == b"afterwards"


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_what_others_break_is_noticed_and_mended(ward: PolicyTestbed, tampering: str) -> None:
    one, two = ward.pod(1), ward.pod(2)
    guard, door = row(Direction.INGRESS, two, None, DENY), row(Direction.INGRESS, two, one, ALLOW, protocol=TCP)
    ward.put(guard, door)
    wanted = ward.parts([one, two], (guard, door))
    ward.datapath.converge(wanted)
    assert not ward.datapath.has_drifted()
    nft(ward, TAMPERINGS[tampering])
    assert ward.datapath.has_drifted()
    ward.datapath.converge(wanted)
    assert not ward.datapath.has_drifted()
    assert ward.ask(one, two, UDP, PORT) == DENY
    assert ward.ask(one, two, TCP, PORT) == 0
    assert ward.datapath.converge(wanted).repaired == ()


def test_our_own_changes_disturb_nobody(ward: PolicyTestbed) -> None:
    one = ward.pod(1)
    ward.put(row(Direction.EGRESS, one, None, DENY))
    ward.drop(row(Direction.EGRESS, one, None, DENY))
    ward.unplug(one)
    assert not ward.datapath.has_drifted()


def test_a_restart_keeps_connections_and_counts(ward: PolicyTestbed) -> None:
    one, two = ward.pod(1), ward.pod(2)
    guard, door = row(Direction.INGRESS, two, None, DENY), row(Direction.INGRESS, two, one, ALLOW, protocol=UDP)
    ward.put(guard, door)
    with (
        two.open_socket(4, socket.SOCK_DGRAM, port=PORT) as server,
        one.open_socket(4, socket.SOCK_DGRAM, port=PORT) as client,
    ):
        assert ward.ask(one, two, TCP, PORT) == DENY
        for _ in range(5):
            client.sendto(b"?", server.getsockname()[:2])
            _hear(server)
            ward.restart()
            server.sendto(b"!", client.getsockname()[:2])
            _hear(client)
            assert ward.datapath.converge(ward.parts([one, two], (guard, door))).repaired == ()
        assert ward.datapath.drops() == []
    assert ward.count(DENY) >= 1
    assert ward.count(ALLOW) >= 5


def _hear(listener: socket.socket) -> None:
    assert select.select([listener], [], [], DEADLINE)[0]
    listener.recv(1)


def test_what_was_stamped_before_a_restart_is_judged_after_it(ward: PolicyTestbed) -> None:
    """The policy may have changed while nobody was there to see: no old stamp is ever valid again."""
    one, two = ward.pod(1), ward.pod(2)
    with (
        two.open_socket(4, socket.SOCK_DGRAM, port=PORT) as server,
        one.open_socket(4, socket.SOCK_DGRAM, port=PORT) as client,
    ):
        client.sendto(b"?", server.getsockname()[:2])
        _hear(server)
        ward.restart()
        ward.datapath.converge(ward.parts([one, two], (row(Direction.EGRESS, one, None, DENY),)))
        client.sendto(b"?", server.getsockname()[:2])
        assert ward.fate(server, one.address(4)) == DENY


def test_a_change_writes_the_rules_of_a_start(ward: PolicyTestbed) -> None:
    """A start says them in nft's own language, a change in the kernel's: they differ in the stamp alone."""
    by_start = listed_rules(ward)
    ward.pod(1)
    by_change = listed_rules(ward)
    assert by_start != by_change
    before, after = (
        sorted({word for line in rules for word in STAMPS.findall(line)}) for rules in (by_start, by_change)
    )
    assert len(before) == len(after) == 2
    renamed = dict(zip(after, before, strict=True))
    assert [STAMPS.sub(lambda found: renamed[found[0]], line) for line in by_change] == by_start


STAMPS = re.compile(r"0x[4-7][0-9a-f]{7}\b")


def listed_rules(ward: PolicyTestbed) -> list[str]:
    """The rules of the table, in their order."""
    command = ["nft", "list", "table", "inet", "weft"]
    done = ward.space.namespace.run(
        lambda: subprocess.run(command, text=True, capture_output=True, check=True, timeout=DEADLINE)
    )
    return [line for line in done.stdout[done.stdout.index("\tchain ") :].splitlines() if line.startswith("\t\t")]


def test_twenty_thousand_rows_in_one_transaction(ward: PolicyTestbed) -> None:
    one, two = ward.pod(1), ward.pod(2)
    others = [
        PolicyEntry(
            TENANT, Direction.INGRESS, two.number, WORKLOAD | 1000 + number // 10, ALLOW, TCP, (number % 10 + 1,) * 2
        )
        for number in range(20_000)
    ]
    ward.put(row(Direction.INGRESS, two, None, DENY), *others)
    assert ward.ask(one, two, TCP, PORT) == DENY
    ward.put(row(Direction.INGRESS, two, one, ALLOW, protocol=TCP, ports=(PORT, PORT)))
    assert ward.ask(one, two, TCP, PORT) == 0
    ward.drop(*others)
    assert len(policy_entries(ward)) < 100
