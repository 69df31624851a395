"""Policy on the linux datapath: the cost of rules per connection, per packet and per change.

Compared values alternate, and medians are reported. The latency of a change is in `bench.rule_changes`, the cost of
rules per ADD in `bench.cni`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.support.policy_testbed import Pod, PolicyTestbed, open_testbed

from bench import cni, rule_changes
from bench.figures import Figure, Skipped, figure, paired_figure
from bench.labs import Pair, round_trips, start_servers
from bench.rulebook import GROUPS, OPEN, RULES_EACH, MakeRule, Rulebook, exact_rule, range_rule
from weft.domain import model
from weft.domain.desired.diff import Difference
from weft.kernel.netns import NamespaceDirectory
from weft.lab.namespaces import private_namespaces
from weft.lab.waiting import DEADLINE

ROUNDS = 9
FEW, SOME, MANY = 10, 5_000, 10_000
CONNECTIONS, CHANGES = 1_000, 10
_LINGER_RST = struct.pack("ii", 1, 0)
_CHECKOUT = Path(__file__).parents[1]


class PolicedNode(NamedTuple):
    """A node whose tenant has rules, with a server pod and a client pod that may connect to it."""

    testbed: PolicyTestbed
    rulebook: Rulebook
    server: Pod
    client: Pod


def run() -> dict[str, Figure]:
    if os.geteuid() != 0:
        raise Skipped("creating network namespaces needs root")
    with tempfile.TemporaryDirectory() as directory, private_namespaces(), ExitStack() as stack:
        testbeds = Testbeds(Path(directory), stack)
        few, many = testbeds.policed(FEW), testbeds.policed(MANY)
        figures = _measure_connections(few, many)
        figures |= _measure_round_trips(many, testbeds.bare_veth())
        figures |= _measure_updates(testbeds.policed(SOME), testbeds.policed(SOME, range_rule))
        figures |= _measure_starts(testbeds.empty())
    figures |= rule_changes.run()
    try:
        return figures | cni.run_with_rules()
    except Skipped as reason:
        print(f"policy: ADD with rules is skipped: {reason}")
        return figures


class Testbeds:
    """Creates nodes in a directory; they are removed with the stack."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._made = 0

    def _folder(self) -> Path:
        self._made += 1
        folder = self._directory / str(self._made)
        folder.mkdir()
        return folder

    def empty(self) -> PolicyTestbed:
        return self._stack.enter_context(open_testbed(self._folder()))

    def policed(self, rules: int, make_rule: MakeRule = exact_rule) -> PolicedNode:
        testbed, rulebook = self.empty(), Rulebook(rules, make_rule)
        server, client = (testbed.pod(number, ready=False) for number in (1, 2))
        testbed.datapath.apply(rulebook.full_sync())
        return PolicedNode(testbed, rulebook, server, client)

    def bare_veth(self) -> Pair:
        """Two namespaces connected by a veth pair."""
        directory = NamespaceDirectory(self._folder())
        directory.prepare()
        ends = []
        for number in (1, 2):
            namespace = self._stack.enter_context(directory.create(f"end{number}"))
            ends.append((namespace, directory.path / f"end{number}"))
        lines = {0: [f"link add eth0 type veth peer name eth0 netns {ends[1][1]}"], 1: []}
        for number, (namespace, _) in enumerate(ends):
            lines[number] += [f"addr add 10.98.0.{number + 1}/24 dev eth0", "link set eth0 mtu 1450 up"]
            batch = "\n".join(lines[number]).encode()
            namespace.run(partial(_checked, ["ip", "-batch", "-"], batch))
        return Pair(ends[0][1], ends[1][1], "10.98.0.2")


def _checked(command: list[str], stdin: bytes = b"") -> bytes:
    return subprocess.run(command, input=stdin, capture_output=True, check=True, timeout=DEADLINE, cwd=_CHECKOUT).stdout


def _measure_connections(few: PolicedNode, many: PolicedNode) -> dict[str, Figure]:
    found = _by_turns({"few": lambda: _connections_per_second(few), "many": lambda: _connections_per_second(many)})
    ours, peer = median(found["many"]), median(found["few"])
    return {
        f"new connections with {MANY} rules": figure(
            ours,
            peer=peer,
            unit="1/s",
            target=0.87 * peer,
            more_is_better=True,
            note=f"TCP on one node, {GROUPS} groups; peer: {FEW} rules",
        )
    }


def _by_turns(measures: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Rounds of each measurement, in alternating order."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(ROUNDS):
        for name in sorted(measures, reverse=number % 2 == 1):
            found[name].append(measures[name]())
    return found


def _connections_per_second(policed: PolicedNode) -> float:
    """Sequential TCP connections per second, each closed with RST."""
    where = str(policed.server.address(4)), OPEN
    with policed.server.open_socket(4, socket.SOCK_STREAM, port=OPEN) as listener:
        listener.listen(64)
        listener.settimeout(DEADLINE)
        began = time.perf_counter()
        for _ in range(CONNECTIONS):
            with policed.client.open_socket(4, socket.SOCK_STREAM) as connection:
                connection.settimeout(DEADLINE)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RST)
                connection.connect(where)
                listener.accept()[0].close()
        return CONNECTIONS / (time.perf_counter() - began)


def _measure_round_trips(policed: PolicedNode, bare: Pair) -> dict[str, Figure]:
    ours = Pair(Path(policed.client.config.netns), Path(policed.server.config.netns), str(policed.server.address(4)))
    took, theirs = [], []
    with ExitStack() as stack:
        asyncio.run(start_servers({"one host": (ours, bare)}, stack))
        for _ in range(ROUNDS):
            some, others = round_trips(ours, bare)
            took += some
            theirs += others
    note = f"64 bytes by TCP, both ends on one core, {MANY} rules; peer: a bare veth; median of the pairs' ratios"
    return {"round trip with policy": paired_figure(took, theirs, unit="us", most=1.3, note=note)}


def _measure_updates(exact: PolicedNode, ranges: PolicedNode) -> dict[str, Figure]:
    found: dict[str, list[float]] = {"add": [], "remove": []}
    peers: dict[str, list[float]] = {"add": [], "remove": []}
    for _ in range(ROUNDS * CHANGES):
        _update(ranges, range_rule(0, RULES_EACH), found)
        _update(exact, exact_rule(0, RULES_EACH), peers)
    figures = {}
    for what, times in found.items():
        ours, peer = median(times), median(peers[what])
        note = "from the store's event to the kernel; peer: an exact rule"
        figures[f"{what} one range rule, {SOME} rules"] = figure(
            ours, peer=peer, unit="ms", target=10 * peer, note=note
        )
    return figures


def _update(policed: PolicedNode, rule: model.Rule, times: dict[str, list[float]]) -> None:
    """Add and remove a rule."""
    for what, change in (("add", policed.rulebook.put), ("remove", policed.rulebook.drop)):
        began = time.perf_counter()
        policed.testbed.datapath.apply(change(rule))
        times[what].append((time.perf_counter() - began) * 1e3)


def _measure_starts(testbed: PolicyTestbed) -> dict[str, Figure]:
    note = f"engine, policy map and kernel; {GROUPS} groups"
    times = [_start(testbed) for _ in range(ROUNDS)]
    return {f"full sync of {MANY} rules": figure(median(times), unit="s", target=3.0, note=note)}


def _start(testbed: PolicyTestbed) -> float:
    rulebook = Rulebook(MANY, exact_rule)
    began = time.perf_counter()
    everything = rulebook.full_sync()
    testbed.datapath.apply(everything)
    took = time.perf_counter() - began
    testbed.datapath.apply(Difference((), everything.put))
    return took
