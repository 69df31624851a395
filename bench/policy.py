"""Figures of policy in packets on the linux datapath: what rules cost a connection, a packet, and who changes them.

What is compared takes turns, and medians are told. How soon a change is in force is in `bench.rule_changes`, what
rules cost an attachment in `bench.cni`.
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

from tests.support.policy_testbed import Pod, PolicyTestbed, open_ward

from bench import cni, rule_changes
from bench.figures import Figure, Skipped, figure, paired_figure
from bench.labs import Pair, open_answerers, round_trips
from bench.rulebook import GROUPS, OPEN, RULES_EACH, MakeRule, Rulebook, exact_rule, range_rule
from weft.domain import model
from weft.domain.desired.diff import Difference
from weft.kernel.netns import NamespaceDirectory
from weft.lab.namespaces import stepped_apart
from weft.lab.waiting import DEADLINE

ROUNDS = 9
FEW, SOME, MANY = 10, 5_000, 10_000
CALLS, CHANGES = 1_000, 10
_ENDS_AT_ONCE = struct.pack("ii", 1, 0)
_CHECKOUT = Path(__file__).parents[1]


class Guarded(NamedTuple):
    """A node whose tenant has many rules or few, with a pod that answers and one that may ask it."""

    ward: PolicyTestbed
    rulebook: Rulebook
    answers: Pod
    asks: Pod


def run() -> dict[str, Figure]:
    if os.geteuid() != 0:
        raise Skipped("it makes network namespaces, which takes root")
    with tempfile.TemporaryDirectory() as directory, stepped_apart(), ExitStack() as stack:
        wards = Wards(Path(directory), stack)
        few, many = wards.guarded(FEW), wards.guarded(MANY)
        figures = _measure_connections(few, many)
        figures |= _measure_round_trips(many, wards.bare_veth())
        figures |= _measure_updates(wards.guarded(SOME), wards.guarded(SOME, range_rule))
        figures |= _measure_starts(wards.empty())
    figures |= rule_changes.run()
    try:
        return figures | cni.run_with_rules()
    except Skipped as reason:
        print(f"policy: attachments with rules are left out: {reason}")
        return figures


class Wards:
    """Nodes in a directory, until the stack is closed."""

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
        return self._stack.enter_context(open_ward(self._folder()))

    def guarded(self, rules: int, make_rule: MakeRule = exact_rule) -> Guarded:
        ward, rulebook = self.empty(), Rulebook(rules, make_rule)
        answers, asks = (ward.pod(number, ready=False) for number in (1, 2))
        ward.datapath.apply(rulebook.enter())
        return Guarded(ward, rulebook, answers, asks)

    def bare_veth(self) -> Pair:
        """Two namespaces with a cable between them."""
        directory = NamespaceDirectory(self._folder())
        directory.prepare()
        ends = []
        for number in (1, 2):
            space = self._stack.enter_context(directory.create(f"end{number}"))
            ends.append((space, directory.path / f"end{number}"))
        lines = {0: [f"link add eth0 type veth peer name eth0 netns {ends[1][1]}"], 1: []}
        for number, (space, _) in enumerate(ends):
            lines[number] += [f"addr add 10.98.0.{number + 1}/24 dev eth0", "link set eth0 mtu 1450 up"]
            batch = "\n".join(lines[number]).encode()
            space.run(partial(_checked, ["ip", "-batch", "-"], batch))
        return Pair(ends[0][1], ends[1][1], "10.98.0.2")


def _checked(command: list[str], said: bytes = b"") -> bytes:
    return subprocess.run(command, input=said, capture_output=True, check=True, timeout=DEADLINE, cwd=_CHECKOUT).stdout


def _measure_connections(few: Guarded, many: Guarded) -> dict[str, Figure]:
    found = _by_turns({"few": lambda: _calls(few), "many": lambda: _calls(many)})
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
    """So many rounds of each, in alternating order."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(ROUNDS):
        for name in sorted(measures, reverse=number % 2 == 1):
            found[name].append(measures[name]())
    return found


def _calls(guarded: Guarded) -> float:
    """Connections per second, one after the other, each reset at its end."""
    where = str(guarded.answers.address(4)), OPEN
    with guarded.answers.open_socket(4, socket.SOCK_STREAM, port=OPEN) as ear:
        ear.listen(64)
        ear.settimeout(DEADLINE)
        began = time.perf_counter()
        for _ in range(CALLS):
            with guarded.asks.open_socket(4, socket.SOCK_STREAM) as caller:
                caller.settimeout(DEADLINE)
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ENDS_AT_ONCE)
                caller.connect(where)
                ear.accept()[0].close()
        return CALLS / (time.perf_counter() - began)


def _measure_round_trips(guarded: Guarded, bare: Pair) -> dict[str, Figure]:
    ours = Pair(Path(guarded.asks.wiring.netns), Path(guarded.answers.wiring.netns), str(guarded.answers.address(4)))
    took, theirs = [], []
    with ExitStack() as stack:
        asyncio.run(open_answerers({"one host": (ours, bare)}, stack))
        for _ in range(ROUNDS):
            some, others = round_trips(ours, bare)
            took += some
            theirs += others
    note = f"64 bytes by TCP, both ends on one core, {MANY} rules; peer: a bare veth; median of the pairs' ratios"
    return {"round trip with policy": paired_figure(took, theirs, unit="us", most=1.3, note=note)}


def _measure_updates(exact: Guarded, ranges: Guarded) -> dict[str, Figure]:
    found: dict[str, list[float]] = {"more": [], "less": []}
    peers: dict[str, list[float]] = {"more": [], "less": []}
    for _ in range(ROUNDS * CHANGES):
        _update(ranges, range_rule(0, RULES_EACH), found)
        _update(exact, exact_rule(0, RULES_EACH), peers)
    figures = {}
    for what, times in found.items():
        ours, peer = median(times), median(peers[what])
        note = f"from the store's news to the kernel; peer: an exact rule {what} among {SOME}"
        figures[f"one range rule {what} among {SOME}"] = figure(ours, peer=peer, unit="ms", target=10 * peer, note=note)
    return figures


def _update(guarded: Guarded, rule: model.Rule, times: dict[str, list[float]]) -> None:
    """A rule comes and goes again."""
    for what, tell in (("more", guarded.rulebook.put), ("less", guarded.rulebook.drop)):
        began = time.perf_counter()
        guarded.ward.datapath.apply(tell(rule))
        times[what].append((time.perf_counter() - began) * 1e3)


def _measure_starts(ward: PolicyTestbed) -> dict[str, Figure]:
    note = f"engine, tables and kernel; {GROUPS} groups"
    times = [_start(ward) for _ in range(ROUNDS)]
    return {f"{MANY} rules from nothing": figure(median(times), unit="s", target=3.0, note=note)}


def _start(ward: PolicyTestbed) -> float:
    rulebook = Rulebook(MANY, exact_rule)
    began = time.perf_counter()
    everything = rulebook.enter()
    ward.datapath.apply(everything)
    took = time.perf_counter() - began
    ward.datapath.apply(Difference((), everything.put))
    return took
