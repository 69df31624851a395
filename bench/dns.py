"""netdns: answers per second on one core, compared with dnsmasq with the same names, in alternating rounds.

The rate is by the server's CPU time, which a busy machine does not affect; the wall-clock rate, with the server on one
core and the load on another, is noted too. Needs root: it runs in private namespaces.
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
from weft.dns.encode import encode_name, question_key
from weft.dns.wire import Type
from weft.domain.addresses import parse_address
from weft.domain.dns.names import Entry, Rank, Zone, address_records, forward_and_reverse_records
from weft.domain.errors import Unavailable
from weft.domain.ids import TenantName
from weft.kernel.netlink.link import LOOPBACK_IFINDEX, change_link
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import NamespaceDirectory
from weft.kernel.uapi.netlink import NETLINK_ROUTE
from weft.lab.namespaces import enter_private_namespaces, unmount
from weft.lab.servers.processes import DEADLINE, Child
from weft.runtime.backoff import Backoff
from weft.runtime.dns_control import FullSync, send_once

NAMES, ABSENT, MEMBERS = 1_000, 100, 100
QUESTIONS, ROUNDS, WINDOW = 30_000, 5, 32
TARGET = 15_000
WITHIN = 600
_TENANT, _PEER = TenantName("bench"), "peer"
_SERVER_CORE, _LOAD_CORE = "0", str((os.cpu_count() or 1) - 1)


class Round(NamedTuple):
    """Answers per second of CPU time and of wall-clock time."""

    by_core: float
    by_clock: float


def run() -> dict[str, Figure]:
    """Measure in a new process, which can enter private namespaces."""
    command = [sys.executable, "-m", "bench.dns"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=WITHIN, cwd=Path(__file__).parents[1])
    return msgspec.json.decode(answer.stdout, type=dict[str, Figure])


def measure() -> dict[str, Figure]:
    enter_private_namespaces()
    single = [f"web{number}" for number in range(NAMES)] + [f"none{number}" for number in range(ABSENT)]
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        namespaces = NamespaceDirectory(home / "netns")
        namespaces.prepare()
        stack.callback(unmount, namespaces.path)
        for name in (_TENANT, _PEER):
            _make_netns(namespaces, name)
            stack.callback(namespaces.delete, name)
        netdns = stack.enter_context(_netdns(home))
        dnsmasq = stack.enter_context(_dnsmasq(home)) if shutil.which("dnsmasq") else None
        ours, groups, peers = [], [], []
        for _ in range(ROUNDS):
            ours.append(_load(home, _TENANT, server=netdns, names=single))
            groups.append(_load(home, _TENANT, server=netdns, names=["group"]))
            if dnsmasq:
                peers.append(_load(home, _PEER, server=dnsmasq, names=single))
    return {
        "DNS answers per second on one core": _figure(
            ours, peers, what=f"{NAMES} names, every eleventh query for a missing name"
        ),
        "DNS group answers per second on one core": _figure(
            groups, [], what=f"10 of {MEMBERS} members, chosen per query"
        ),
    }


def _figure(ours: list[Round], peers: list[Round], *, what: str) -> Figure:
    clock = statistics.median(each.by_clock for each in ours)
    note = f"A by UDP, {what}; CPU time of the server, median of {ROUNDS} rounds; by wall clock {clock:.0f}"
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


def _make_netns(namespaces: NamespaceDirectory, name: str) -> None:
    with namespaces.create(name) as netns, NetlinkSocket(NETLINK_ROUTE, namespace=netns) as netlink:
        netlink.send_batch([change_link(LOOPBACK_IFINDEX, up=True)])


def _inside(home: Path, netns: str, *, core: str) -> list[str]:
    return ["nsenter", f"--net={home / 'netns' / netns}", "taskset", "-c", core]


def _address(number: int) -> str:
    return f"10.1.{number >> 8}.{number & 255}"


def _netdns(home: Path) -> Child:
    names = {
        f"endpoint:{number}": Entry(
            forward_and_reverse_records(
                f"web{number}", (parse_address(_address(number), field="address"),), rank=Rank.WORKLOAD
            )
        )
        for number in range(NAMES)
    }
    members = (parse_address(_address(number), field="address") for number in range(MEMBERS))
    names["group"] = Entry(tuple(address_records("group", members, rank=Rank.GROUP)))
    control_socket = home / "dns.sock"
    command = [sys.executable, "-m", "weft.dns.main", "--run-dir", str(home), "--socket", str(control_socket)]
    child = Child(["taskset", "-c", _SERVER_CORE, *command, "--log-level", "ERROR"])
    asyncio.run(_push_zones(control_socket, FullSync({_TENANT: Zone(names)})))
    return child


async def _push_zones(control_socket: Path, full_sync: FullSync) -> None:
    backoff = Backoff(within=DEADLINE)
    while True:
        try:
            await send_once(control_socket, full_sync)
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


def _load(home: Path, netns: str, *, server: Child, names: Sequence[str]) -> Round:
    """Run one round in a separate process inside the namespace."""
    command = [*_inside(home, netns, core=_LOAD_CORE), sys.executable, "-m", "bench.dns", *names]
    before = _cpu_seconds(server.pid)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=WITHIN)
    return Round(QUESTIONS / (_cpu_seconds(server.pid) - before), QUESTIONS / float(done.stdout))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _query(name: str, *, number: int) -> bytes:
    return struct.pack("!6H", number, 0x0100, 1, 0, 0, 0) + question_key(encode_name(name), Type.A)


def query_all(names: Sequence[str]) -> float:
    """Send QUESTIONS queries, WINDOW at once; return the seconds it took. A missing answer is an error."""
    queries = [_query(Random(number).choice(names), number=number % 65_536) for number in range(QUESTIONS)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(("127.0.0.1", 53))
        _wait_for_server(client, queries[0])
        client.settimeout(DEADLINE)
        began = time.perf_counter()
        for start in range(0, QUESTIONS, WINDOW):
            window = queries[start : start + WINDOW]
            for query in window:
                client.send(query)
            for _ in window:
                client.recv(1500)
        return time.perf_counter() - began


def _wait_for_server(client: socket.socket, query: bytes) -> None:
    client.settimeout(0.1)
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        try:
            client.send(query)
            client.recv(1500)
        except OSError:
            continue
        return
    raise TimeoutError("the server does not answer")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(query_all(sys.argv[1:]))
    else:
        sys.stdout.buffer.write(msgspec.json.encode(measure()))
