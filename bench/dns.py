"""Figures of netdns: answers per second on one core, beside dnsmasq with the same names, in turns.

What is counted is the servers' own CPU time, so that a busy machine does not show in it; the rate by the clock, with
the server on one core and the load on another, is told beside it. Needs root: all happens in namespaces of its own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from bench.figures import Figure, figure
from weft.agent.dns.control_client import tell
from weft.dns.encode import encode_name, question_key
from weft.dns.wire import Type
from weft.domain.addresses import parse_address
from weft.domain.dns.names import Entry, Rank, Zone, address_records, both_ways
from weft.domain.errors import Unavailable
from weft.domain.ids import TenantName
from weft.kernel.netlink.link import LOOPBACK, alter_link
from weft.kernel.netlink.socket import ROUTE, NetlinkSocket
from weft.kernel.netns import NamespaceDirectory
from weft.lab.namespaces import step_apart, unmount
from weft.lab.servers.processes import DEADLINE, Child
from weft.runtime.backoff import Backoff
from weft.runtime.dns_control import FullSync

NAMES, ABSENT, MEMBERS = 1_000, 100, 100
QUESTIONS, ROUNDS, WINDOW = 30_000, 5, 32
TARGET = 15_000
WITHIN = 600
_TENANT, _PEER = TenantName("bench"), "peer"
_SERVER_CORE, _LOAD_CORE = "0", str((os.cpu_count() or 1) - 1)


class Round(NamedTuple):
    """Answers per second of CPU time, and by the clock."""

    by_core: float
    by_clock: float


def run() -> dict[str, Figure]:
    """Measure in a fresh process, which can step into namespaces of its own."""
    command = [sys.executable, "-m", "bench.dns"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=WITHIN, cwd=Path(__file__).parents[1])
    return msgspec.json.decode(answer.stdout, type=dict[str, Figure])


def measure() -> dict[str, Figure]:
    step_apart()
    single = [f"web{number}" for number in range(NAMES)] + [f"none{number}" for number in range(ABSENT)]
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spaces = NamespaceDirectory(home / "netns")
        spaces.prepare()
        stack.callback(unmount, spaces.path)
        for name in (_TENANT, _PEER):
            _make_space(spaces, name)
            stack.callback(spaces.delete, name)
        netdns = stack.enter_context(_netdns(home))
        dnsmasq = stack.enter_context(_dnsmasq(home)) if shutil.which("dnsmasq") else None
        ours, groups, peers = [], [], []
        for _ in range(ROUNDS):
            ours.append(_load(home, _TENANT, server=netdns, names=single))
            groups.append(_load(home, _TENANT, server=netdns, names=["group"]))
            if dnsmasq:
                peers.append(_load(home, _PEER, server=dnsmasq, names=single))
    return {
        "answers per second on one core": _figure(ours, peers, what=f"{NAMES} names, every eleventh question in vain"),
        "group answers per second on one core": _figure(groups, [], what=f"10 of {MEMBERS} members, chosen anew"),
    }


def _figure(ours: list[Round], peers: list[Round], *, what: str) -> Figure:
    clock = statistics.median(each.by_clock for each in ours)
    note = f"A by UDP, {what}; CPU time of the server, median of {ROUNDS} rounds; by the clock {clock:.0f}"
    if peers:
        note += f", dnsmasq {statistics.median(each.by_clock for each in peers):.0f}"
    return figure(
        statistics.median(each.by_core for each in ours),
        peer=statistics.median(each.by_core for each in peers) if peers else None,
        unit="1/s",
        target=TARGET,
        more_is_better=True,
        note=note,
    )


def _make_space(spaces: NamespaceDirectory, name: str) -> None:
    with spaces.create(name) as space, NetlinkSocket(ROUTE, namespace=space) as netlink:
        netlink.send_batch([alter_link(LOOPBACK, up=True)])


def _inside(home: Path, space: str, *, core: str) -> list[str]:
    return ["nsenter", f"--net={home / 'netns' / space}", "taskset", "-c", core]


def _address(number: int) -> str:
    return f"10.1.{number >> 8}.{number & 255}"


def _netdns(home: Path) -> Child:
    names = {
        f"endpoint:{number}": Entry(
            both_ways(f"web{number}", (parse_address(_address(number), field="address"),), rank=Rank.WORKLOAD)
        )
        for number in range(NAMES)
    }
    members = (parse_address(_address(number), field="address") for number in range(MEMBERS))
    names["group"] = Entry(tuple(address_records("group", members, rank=Rank.GROUP)))
    door = home / "dns.sock"
    command = [sys.executable, "-m", "weft.dns.main", "--run-dir", str(home), "--socket", str(door)]
    child = Child(["taskset", "-c", _SERVER_CORE, *command, "--log-level", "ERROR"])
    asyncio.run(_hand_over(door, FullSync({_TENANT: Zone(names)})))
    return child


async def _hand_over(door: Path, everything: FullSync) -> None:
    backoff = Backoff(within=DEADLINE)
    while True:
        try:
            await tell(door, everything)
        except Unavailable:
            await backoff.pause()
        else:
            return


def _dnsmasq(home: Path) -> Child:
    hosts = home / "hosts"
    hosts.write_text("".join(f"{_address(number)} web{number}\n" for number in range(NAMES)))
    flags = ("--conf-file=/dev/null", "--no-resolv", "--no-hosts", f"--addn-hosts={hosts}", "--domain-needed")
    command = ["dnsmasq", "--keep-in-foreground", "--log-facility=/dev/null", "--user=root", *flags]
    return Child([*_inside(home, _PEER, core=_SERVER_CORE), *command])


def _load(home: Path, space: str, *, server: Child, names: Sequence[str]) -> Round:
    """One round, by a process of its own inside the space."""
    command = [*_inside(home, space, core=_LOAD_CORE), sys.executable, "-m", "bench.dns", *names]
    before = _cpu_seconds(server.pid)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=WITHIN)
    return Round(QUESTIONS / (_cpu_seconds(server.pid) - before), QUESTIONS / float(done.stdout))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _query(name: str, *, number: int) -> bytes:
    return struct.pack("!6H", number, 0x0100, 1, 0, 0, 0) + question_key(encode_name(name), Type.A)


def ask_all(names: Sequence[str]) -> float:
    """Ask QUESTIONS times, WINDOW at once; how long it took. An answer that does not come is an error."""
    queries = [_query(Random(number).choice(names), number=number % 65_536) for number in range(QUESTIONS)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("127.0.0.1", 53))
        _wait_for_server(asking, queries[0])
        asking.settimeout(DEADLINE)
        began = time.perf_counter()
        for start in range(0, QUESTIONS, WINDOW):
            window = queries[start : start + WINDOW]
            for query in window:
                asking.send(query)
            for _ in window:
                asking.recv(1500)
        return time.perf_counter() - began


def _wait_for_server(asking: socket.socket, query: bytes) -> None:
    asking.settimeout(0.1)
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        try:
            asking.send(query)
            asking.recv(1500)
        except OSError:
            continue
        return
    raise TimeoutError("the server does not answer")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(ask_all(sys.argv[1:]))
    else:
        sys.stdout.buffer.write(msgspec.json.encode(measure()))
