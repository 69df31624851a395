"""Drop events with reasons, per-rule counters and packet traces, on real nodes."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support import inventory
from tests.support.flood import Flood, FloodDatagram
from tests.support.modes import ON_ALL

from weft.kernel.netns import Namespace
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.servers.processes import DEADLINE
from weft.lab.traffic import TCP, UDP, Transport
from weft.lab.waiting import eventually

WEFT = (sys.executable, "-m", "weft.cli")
DENY_TCP_81 = "contiv/default/shop/no-81"
DENY_UDP = "contiv/default/shop/no-udp"
DENY_ICMP = "contiv/default/shop/no-ping"


@pytest.fixture
async def host(lab: NetLab) -> Host:
    """A node in a cluster where the group `shop` is denied TCP to port 81, UDP to port 53, and pings."""
    await lab.network("net", subnet="10.1.0.0/16", gateway="10.1.255.254", ipv6Subnet="2001:db8:1::/64")
    (await lab.rest.put("policys", tenantName="default", policyName="shop")).accepted()
    await deny(lab, "no-81", protocol="tcp", port=81)
    await deny(lab, "no-udp", protocol="udp", port=53)
    await deny(lab, "no-ping", protocol="icmp")
    await lab.group("shop", network="net", policies=["shop"])
    await lab.group("guests", network="net")
    return await lab.host("one")


async def deny(lab: NetLab, rule: str, *, policy: str = "shop", **members: object) -> None:
    document = {"policyName": policy, "ruleId": rule, "priority": 10, "direction": "in", "action": "deny"} | members
    (await lab.rest.put("rules", tenantName="default", **document)).accepted()


async def pods(host: Host, other: Host | None = None) -> tuple[Pod, Pod]:
    """A pod without a group, and a pod of the group `shop`."""
    guest = await host.pod("guest", network="net", group="guests")
    return guest, await (other or host).pod("till", network="net", group="shop")


async def weft(host: Host, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a `weft` command on a host."""

    def run() -> subprocess.CompletedProcess[str]:
        with Namespace.open(host.netns) as machine:
            return machine.run(
                lambda: subprocess.run([*WEFT, *words], capture_output=True, timeout=DEADLINE, check=False, text=True)
            )

    return await asyncio.to_thread(run)


async def drops(host: Host, *words: str) -> list[dict[str, Any]]:
    done = await weft(host, "drops", "--json", *words)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def metric(host: Host, line: str) -> float:
    """The value of a time series of the agent, 0 if it does not exist."""
    loop = asyncio.get_running_loop()
    text = b""
    with Namespace.open(host.netns) as machine:
        connection = machine.open_socket(socket.AF_INET, socket.SOCK_STREAM)
    with connection:
        connection.setblocking(False)
        async with asyncio.timeout(DEADLINE):
            await loop.sock_connect(connection, ("127.0.0.1", 9090))
            await loop.sock_sendall(connection, b"GET /metrics HTTP/1.0\r\n\r\n")
            while part := await loop.sock_recv(connection, 1 << 16):
                text += part
    found = [each.rpartition(" ")[2] for each in text.decode().splitlines() if each.startswith(f"{line} ")]
    return float(found[0]) if found else 0.0


def send_packet(source: Pod, target: Pod, *, port: int, transport: Transport = UDP, family: int = 4) -> int:
    """Send one packet and return its source port."""
    with source.place(family).open_client(transport) as caller:
        there = (str(target.address(family)), port)
        if transport is UDP:
            caller.sendto(b"?", there)
        else:
            caller.connect_ex(there)
        return int(caller.getsockname()[1])


@asynccontextmanager
async def following(host: Host, *words: str) -> AsyncIterator[asyncio.StreamReader]:
    """The lines of `weft drops --follow`."""
    command = ["nsenter", f"--net={host.netns}", "--", *WEFT, "drops", "--follow", *words]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    try:
        yield child.stdout
    finally:
        child.kill()
        await child.wait()


@ON_ALL
@pytest.mark.parametrize("family", [4, 6])
async def test_a_drop_event_names_the_rule_and_the_pods(host: Host, family: int) -> None:
    guest, till = await pods(host)
    port = send_packet(guest, till, port=81, transport=TCP, family=family)
    (drop, *_) = await eventually(lambda: drops(host, "--tenant", "default", "--pod", "lab/till"), bool)
    assert (drop["rule"], drop["direction"], drop["service"]) == (DENY_TCP_81, "ingress", "tcp/81")
    assert "denies it" in drop["reason"]
    assert (drop["source"]["pod"], drop["target"]["pod"]) == ("lab/guest", "lab/till")
    assert (drop["source"]["address"], drop["source"]["port"]) == (str(guest.address(family)), port)
    assert drop["target"]["identity"] == "default:net:till"
    assert await drops(host, "--tenant", "absent") == []
    assert await drops(host, "--pod", "absent") == []
    shown = (await weft(host, "drops")).stdout
    assert f"lab/guest ({guest.address(family)})" in shown
    assert DENY_TCP_81 in shown


@ON_ALL
async def test_a_spoofed_packet_is_attributed_to_its_pod(host: Host) -> None:
    """The sender is named whatever source address it uses."""
    guest, till = await pods(host)
    assert await guest.eventually_reaches(
        till
    )  # fill the ARP cache: on a segment, ARP from a spoofed address gets no reply
    inventory.run(guest.netns, "ip addr add 10.1.77.77/32 dev eth0")
    with guest.place().open_socket(UDP) as forger:
        forger.bind(("10.1.77.77", 0))
        forger.sendto(b"?", (str(till.address()), 5000))
    (drop, *_) = await eventually(lambda: drops(host, "--pod", "guest"), bool)
    assert (drop["rule"], drop["direction"]) == ("weft/spoofed", "")
    assert "not the sender's own" in drop["reason"]
    assert (drop["source"]["pod"], drop["source"]["address"]) == ("lab/guest", "10.1.77.77")
    assert await eventually(
        lambda: metric(host, 'weft_dropped_packets_total{reason="weft/spoofed"}'), lambda count: count >= 1
    )


@ON_ALL
async def test_drops_follow_streams_events(host: Host) -> None:
    guest, till = await pods(host)
    async with following(host, "--pod", "till") as lines:

        async def next_line() -> bytes:
            send_packet(guest, till, port=53)
            try:
                async with asyncio.timeout(0.5):
                    return await lines.readline()
            except TimeoutError:
                return b""  # the follower may not be connected yet

        line = (await eventually(next_line, bool)).decode()
    assert "lab/guest" in line
    assert "lab/till" in line
    assert f"udp/53  {DENY_UDP}: the rule denies it" in line


@ON_ALL
async def test_a_drop_flood_and_a_stalled_reader_do_not_block_the_agent(host: Host) -> None:
    guest, till = await pods(host)
    with Namespace.open(host.netns) as machine:
        idler = machine.open_socket(socket.AF_INET, socket.SOCK_STREAM)
    with idler, guest.place().open_client(UDP) as sender, Flood() as flood:
        idler.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(idler, ("127.0.0.1", 9090))
        await loop.sock_sendall(idler, b"GET /drops?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        flood.datagrams = (FloodDatagram(sender, str(till.address()), 53),) * 20
        refused = f'weft_policy_rule_packets_total{{action="denied",rule="{DENY_UDP}"}}'
        await eventually(lambda: metric(host, refused), lambda count: count > 5000)
        other = await host.pod("other", network="net", group="guests")
        assert await guest.eventually_reaches(other)
        await other.remove()
        events = await drops(host, "--pod", "lab/till")
    assert 1 <= len(events) <= 1000
    assert {drop["rule"] for drop in events} == {DENY_UDP}


@ON_ALL
async def test_rules_are_counted_and_an_audit_policy_counts_its_would_be_drops(lab: NetLab, host: Host) -> None:
    (await lab.rest.put("policys", tenantName="default", policyName="idea", mode="audit")).accepted()
    await deny(lab, "no-8080", policy="idea", protocol="tcp", port=8080)
    await lab.group("careful", network="net", policies=["idea", "shop"])
    guest = await host.pod("guest", network="net", group="guests")
    careful = await host.pod("careful", network="net", group="careful")
    assert await guest.eventually_reaches(careful, port=8080)
    assert await guest.never_reaches(careful, port=81)
    done = await weft(host, "drops", "--counters", "--json", "--tenant", "default")
    counted = {(row["rule"], row["action"]): row["packets"] for row in map(json.loads, done.stdout.splitlines())}
    assert counted["contiv/default/idea/no-8080", "would-deny"] >= 1
    assert counted[DENY_TCP_81, "denied"] >= 1
    assert await metric(
        host, 'weft_policy_rule_packets_total{action="would-deny",rule="contiv/default/idea/no-8080"}'
    ) >= 1  # fmt: skip
    assert [drop["rule"] for drop in await drops(host) if drop["service"] == "tcp/8080"] == []
    await host.start()
    restarted = (await weft(host, "drops", "--counters")).stdout
    assert "would-deny" in restarted


@ON_ALL
@pytest.mark.parametrize("flags", [(), ("-6",)])
async def test_a_packet_trace_agrees_with_the_policy_engine(host: Host, flags: tuple[str, ...]) -> None:
    guest, _ = await pods(host)
    services = {"tcp/80": "", "tcp/81": DENY_TCP_81, "udp/5000": "", "udp/53": DENY_UDP, "icmp": DENY_ICMP}
    for service, rule in services.items():
        done = await weft(host, "trace", "--packet", "--json", *flags, "guest", "lab/till", service)
        assert done.returncode == 0, f"{service}: {done.stdout} {done.stderr}"
        answer = json.loads(done.stdout)
        assert answer["agree"] is True
        assert answer["engine"]["allowed"] is (rule == "")
        assert (answer["packet"]["status"] == "dropped") is bool(rule)
        assert not rule or answer["packet"]["by"] == rule
    back = await weft(host, "trace", "--packet", *flags, "till", str(guest.address(6 if flags else 4)), "icmp")
    assert back.returncode == 0, back.stdout
    assert "they AGREE" in back.stdout


@ON_ALL
async def test_a_packet_trace_to_another_node_uses_the_reply(lab: NetLab, host: Host) -> None:
    two = await lab.host("two")
    guest, till = await pods(host, two)
    assert await guest.eventually_reaches(till)
    passed = await weft(host, "trace", "--packet", "guest", "till", "tcp/80")
    assert passed.returncode == 0, passed.stdout
    assert "answered by RST" in passed.stdout
    blocked = await weft(host, "trace", "--packet", "guest", "till", "tcp/81")
    assert blocked.returncode == 0, blocked.stdout
    assert f"dropped by {DENY_TCP_81}" in blocked.stdout
    elsewhere = await weft(host, "trace", "--packet", "till", "guest", "tcp/80")
    assert elsewhere.returncode == 3
    assert "on two: run the trace there" in elsewhere.stderr


async def test_a_packet_trace_reports_a_datapath_that_differs_from_the_engine(host: Host) -> None:
    """First a foreign nft chain drops the packet; then its sender has a spoofed MAC."""
    guest, _ = await pods(host)
    netns = host.tenants.path / "default"
    inventory.run(netns, "nft add table inet foreign")
    inventory.run(netns, "nft add chain inet foreign c { type filter hook forward priority 9 ; policy drop ; }")
    unseen = await weft(host, "trace", "--packet", "guest", "till", "tcp/80")
    assert unseen.returncode == 6, unseen.stdout
    assert "lost: " in unseen.stdout
    inventory.run(guest.netns, "ip link set eth0 address 02:00:00:00:00:66")
    differs = await weft(host, "trace", "--packet", "guest", "till", "udp/5000")
    assert differs.returncode == 1, differs.stdout
    assert "dropped by weft/spoofed" in differs.stdout
    assert "they DIFFER" in differs.stdout
