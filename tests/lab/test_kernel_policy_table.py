"""The nft table of a tenant netns: read back, tampered with, restarted, and with very many entries."""

from __future__ import annotations

import itertools
import random
import re
import select
import socket
import subprocess

import pytest
from tests.support.modes import BRIDGE_IN_SOAK
from tests.support.policy_testbed import TENANT, PolicyTestbed, counters_of, policy_entry

from weft.adapters.netns.nft.entries import Entry
from weft.adapters.netns.nft.policy_maps import policy_map_entries
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
    PolicyItem,
    VerdictCounter,
)
from weft.lab.waiting import DEADLINE

pytestmark = BRIDGE_IN_SOAK

ALLOW, DENY = 0x111, VERDICT_DENY | 0x222
PORT = 8080


def nft(testbed: PolicyTestbed, command: str) -> None:
    testbed.netns.namespace.run(lambda: subprocess.run(["nft", command], check=True, timeout=DEADLINE))


def policy_entries(testbed: PolicyTestbed) -> set[Entry]:
    return {
        entry
        for entry in testbed.netns.table.read()
        if not entry.name.startswith(("l3_spoofguard", "hairpin_self", "same_bridge"))
    }


def entries(items: set[PolicyItem]) -> set[Entry]:
    return {entry for item in items for entry in policy_map_entries(item)}


def random_items(chance: random.Random) -> set[PolicyItem]:
    """State items of every form that may exist together."""
    items: set[PolicyItem] = set()
    for family, top in ((4, (1 << 32) - 1), (6, (1 << 128) - 1)):
        for base in (0, top // 3, top - 40):
            cuts = sorted(chance.sample(range(42), chance.randint(2, 8)))
            for first, after in itertools.pairwise(cuts):
                if chance.random() < 0.7:
                    items.add(CidrIdentity(TENANT, Range(family, base + first, base + after - 1), chance.randint(1, 3)))
        for number in chance.sample(range(20), 8):
            items.add(IpIdentity(TENANT, Address(family, number), WORKLOAD | chance.randint(1, 3)))
    for direction in Direction:
        for remote in (None, 1, 2):
            local = WORKLOAD | chance.randint(1, 3)
            verdict_id = chance.choice((ALLOW, DENY))
            items.add(PolicyEntry(TENANT, direction, local, remote, verdict_id))
            items.add(PolicyEntry(TENANT, direction, local, remote, verdict_id, chance.choice((TCP, UDP))))
            for port in chance.sample(range(100), 3):
                ports = (port * 600, port * 600 + chance.choice((0, 1, 599)))
                items.add(PolicyEntry(TENANT, direction, local, remote, verdict_id, TCP, ports))
    return items | set(counters_of(list(items)))


@pytest.mark.parametrize("seed", range(5))
def test_changes_applied_step_by_step_are_read_back(testbed: PolicyTestbed, seed: int) -> None:
    chance = random.Random(seed)
    there: set[PolicyItem] = set()
    for _ in range(20):
        wanted = random_items(chance)
        testbed.datapath.apply(Difference(tuple(wanted - there), tuple(there - wanted)))
        assert policy_entries(testbed) == entries(wanted)
        there = wanted


def test_converge_changes_any_policy_into_any_other(testbed: PolicyTestbed) -> None:
    chance = random.Random(7)
    for _ in range(10):
        wanted = random_items(chance)
        everything = testbed.items([], tuple(wanted))
        assert testbed.datapath.converge(everything).repaired
        assert policy_entries(testbed) == entries(wanted)
        assert testbed.datapath.converge(everything).repaired == ()


def test_a_change_succeeds_if_others_have_made_half_of_it(testbed: PolicyTestbed) -> None:
    """A missing element is deleted without error, and an element with another value gets the desired one."""
    address = Address(4, 0x0A000063)
    old, new = IpIdentity(TENANT, address, 5), IpIdentity(TENANT, address, 6)
    other = VerdictCounter(TENANT, ALLOW)
    testbed.put(old, other)
    nft(testbed, "delete element inet weft ip_identity_src4 { 10.0.0.99 }")
    testbed.datapath.apply(Difference((new,), (old, other)))
    assert policy_entries(testbed) == entries({new})
    testbed.datapath.apply(Difference((old,), ()))
    assert policy_entries(testbed) == entries({old})


TAMPERINGS = {
    "everything flushed": "flush ruleset",
    "the table deleted": "delete table inet weft",
    "the rules flushed": "flush table inet weft",
    "an accept rule inserted": "insert rule inet weft forward accept",
    "a chain flushed": "flush chain inet weft ct_mark_accept",
    "a map flushed": "flush map inet weft ingress_any_all",
    "an element added": "add element inet weft l3_spoofguard4 { wp1 . 0x02020a000001 . 10.0.0.77 }",
    "the policy of a hook changed": "chain inet weft forward { policy accept; }",
    "another table in its place": (
        "delete table inet weft; "
        "table inet weft { map ip_identity_src4 { type inet_service : mark; }; chain log_drop { }; }"
    ),
}


@pytest.mark.parametrize("tampering", ["everything flushed", "the table deleted", "the rules flushed"])
@pytest.mark.parametrize("family", [4, 6])
def test_nothing_passes_until_drift_is_repaired(
    testbed: PolicyTestbed, fwdmode: str, tampering: str, family: int
) -> None:
    """Fail closed without any rule of ours: the kernel itself does not forward."""
    if fwdmode == "bridge":
        pytest.skip("a bridge goes on carrying frames within its network")
    one, two = testbed.pod(1), testbed.pod(2)
    wanted = testbed.items([one, two])
    assert testbed.probe(one, two, UDP, PORT, family=family) == 0
    with (
        two.open_socket(family, socket.SOCK_DGRAM, port=PORT) as listener,
        one.open_socket(family, socket.SOCK_DGRAM) as sender,
    ):
        nft(testbed, TAMPERINGS[tampering])
        sender.sendto(b"meanwhile", listener.getsockname()[:2])
        testbed.datapath.converge(wanted)
        sender.sendto(b"afterwards", listener.getsockname()[:2])
        assert testbed.packet_result(listener, one.address(family)) == 0
        assert listener.recv(64) == b"afterwards"


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_drift_is_detected_and_repaired(testbed: PolicyTestbed, tampering: str) -> None:
    one, two = testbed.pod(1), testbed.pod(2)
    deny, allow = (
        policy_entry(Direction.INGRESS, two, None, DENY),
        policy_entry(Direction.INGRESS, two, one, ALLOW, protocol=TCP),
    )
    testbed.put(deny, allow)
    wanted = testbed.items([one, two], (deny, allow))
    testbed.datapath.converge(wanted)
    assert not testbed.datapath.has_drifted()
    nft(testbed, TAMPERINGS[tampering])
    assert testbed.datapath.has_drifted()
    testbed.datapath.converge(wanted)
    assert not testbed.datapath.has_drifted()
    assert testbed.probe(one, two, UDP, PORT) == DENY
    assert testbed.probe(one, two, TCP, PORT) == 0
    assert testbed.datapath.converge(wanted).repaired == ()


def test_own_changes_are_no_drift(testbed: PolicyTestbed) -> None:
    one = testbed.pod(1)
    testbed.put(policy_entry(Direction.EGRESS, one, None, DENY))
    testbed.drop(policy_entry(Direction.EGRESS, one, None, DENY))
    testbed.unplug(one)
    assert not testbed.datapath.has_drifted()


def test_a_restart_keeps_connections_and_counters(testbed: PolicyTestbed) -> None:
    one, two = testbed.pod(1), testbed.pod(2)
    deny, allow = (
        policy_entry(Direction.INGRESS, two, None, DENY),
        policy_entry(Direction.INGRESS, two, one, ALLOW, protocol=UDP),
    )
    testbed.put(deny, allow)
    with (
        two.open_socket(4, socket.SOCK_DGRAM, port=PORT) as server,
        one.open_socket(4, socket.SOCK_DGRAM, port=PORT) as client,
    ):
        assert testbed.probe(one, two, TCP, PORT) == DENY
        for _ in range(5):
            client.sendto(b"?", server.getsockname()[:2])
            _receive(server)
            testbed.restart()
            server.sendto(b"!", client.getsockname()[:2])
            _receive(client)
            assert testbed.datapath.converge(testbed.items([one, two], (deny, allow))).repaired == ()
        assert testbed.datapath.drops() == []
    assert testbed.count(DENY) >= 1
    assert testbed.count(ALLOW) >= 5


def _receive(listener: socket.socket) -> None:
    assert select.select([listener], [], [], DEADLINE)[0]
    listener.recv(1)


def test_connections_of_an_earlier_process_are_evaluated_again(testbed: PolicyTestbed) -> None:
    """Policy may have changed while no agent ran: no old epoch is ever valid again."""
    one, two = testbed.pod(1), testbed.pod(2)
    with (
        two.open_socket(4, socket.SOCK_DGRAM, port=PORT) as server,
        one.open_socket(4, socket.SOCK_DGRAM, port=PORT) as client,
    ):
        client.sendto(b"?", server.getsockname()[:2])
        _receive(server)
        testbed.restart()
        testbed.datapath.converge(testbed.items([one, two], (policy_entry(Direction.EGRESS, one, None, DENY),)))
        client.sendto(b"?", server.getsockname()[:2])
        assert testbed.packet_result(server, one.address(4)) == DENY


def test_a_change_writes_the_same_rules_as_a_start(testbed: PolicyTestbed) -> None:
    """A start writes them as nft commands, a change as netlink requests: only the epoch differs."""
    by_start = listed_rules(testbed)
    testbed.pod(1)
    by_change = listed_rules(testbed)
    assert by_start != by_change
    before, after = (
        sorted({word for line in rules for word in EPOCH_MARKS.findall(line)}) for rules in (by_start, by_change)
    )
    assert len(before) == len(after) == 2
    renamed = dict(zip(after, before, strict=True))
    assert [EPOCH_MARKS.sub(lambda found: renamed[found[0]], line) for line in by_change] == by_start


EPOCH_MARKS = re.compile(r"0x[4-7][0-9a-f]{7}\b")


def listed_rules(testbed: PolicyTestbed) -> list[str]:
    """The rules of the table, in order."""
    command = ["nft", "list", "table", "inet", "weft"]
    done = testbed.netns.namespace.run(
        lambda: subprocess.run(command, text=True, capture_output=True, check=True, timeout=DEADLINE)
    )
    return [line for line in done.stdout[done.stdout.index("\tchain ") :].splitlines() if line.startswith("\t\t")]


def test_twenty_thousand_entries_in_one_transaction(testbed: PolicyTestbed) -> None:
    one, two = testbed.pod(1), testbed.pod(2)
    others = [
        PolicyEntry(
            TENANT, Direction.INGRESS, two.number, WORKLOAD | 1000 + number // 10, ALLOW, TCP, (number % 10 + 1,) * 2
        )
        for number in range(20_000)
    ]
    testbed.put(policy_entry(Direction.INGRESS, two, None, DENY), *others)
    assert testbed.probe(one, two, TCP, PORT) == DENY
    testbed.put(policy_entry(Direction.INGRESS, two, one, ALLOW, protocol=TCP, ports=(PORT, PORT)))
    assert testbed.probe(one, two, TCP, PORT) == 0
    testbed.drop(*others)
    assert len(policy_entries(testbed)) < 100
