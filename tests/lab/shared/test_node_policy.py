"""Contiv's policy scenarios (contiv 10.5: P1 to P11) with real agents and packets, configured with netctl.

Each is tested on one host and across hosts, with IPv4 and IPv6. Every test has its own tenant in a shared lab.
"""

from __future__ import annotations

import asyncio
import itertools
import socket

import pytest
from tests.support.connectivity import FAMILIES, SILENCE_S, assert_connectivity, between
from tests.support.modes import TOWNS_ON_ALL, needs_routing
from tests.support.tenant_fixture import TenantFixture

from weft.lab.hosts import Pod
from weft.lab.traffic import TCP
from weft.lab.waiting import soon

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    TOWNS_ON_ALL,
]

# Contiv's usual base rule: deny TCP, until a rule of a higher priority allows some.
CLOSED = "-d in -l tcp -p 1 -j deny"


async def test_p1_a_policy_without_rules_allows_everything(testbed: TenantFixture) -> None:
    await testbed.policy("empty")
    await testbed.group("web", "empty")
    web, others = await testbed.pods("web"), await testbed.pods()
    await assert_connectivity(
        allowed=[*between(web, web, "tcp/80", "icmp"), *between(others, web, "tcp/80", "udp/53", "icmp")]
    )


async def test_p2_one_port_is_allowed(testbed: TenantFixture) -> None:
    """Traffic that no rule matches is allowed: Contiv's default."""
    await testbed.policy("some", CLOSED, "-d in -l tcp -P 8000 -p 100 -j allow")
    await testbed.group("web", "some")
    web, others = await testbed.pods("web"), await testbed.pods()
    everyone = [*web, *others]
    await assert_connectivity(
        allowed=[*between(everyone, web, "tcp/8000", "udp/8001", "icmp"), *between(web, others, "tcp/8001")],
        denied=between(everyone, web, "tcp/8001", "tcp/80"),
    )


async def test_p3_adding_and_deleting_a_rule_applies_to_live_connections(testbed: TenantFixture) -> None:
    """Running pods and their established connections are affected at once."""
    await testbed.policy("some", CLOSED)
    await testbed.group("web", "some")
    web, others = await testbed.pods("web"), await testbed.pods()
    await assert_connectivity(denied=between(others, web, "tcp/8001"))
    await testbed.rule("some", "2", "-d in -l tcp -P 8001 -p 100 -j allow")
    await assert_connectivity(allowed=between(others, web, "tcp/8001"))
    connections = [await connect(a, b, family) for a, b, family in itertools.product(others, web, FAMILIES)]
    try:
        for sender, receiver in connections:
            await send(sender, b"before")
            assert await soon(asyncio.get_running_loop().sock_recv(receiver, 64)) == b"before"
        await testbed.drop_rule("some", "2")
        for sender, receiver in connections:
            await send(sender, b"after")
            await send(receiver, b"reverse")
        # A fixed observation window: the absence of a packet is no event to wait for.
        await asyncio.sleep(SILENCE_S)
        for line in connections:
            for end in line:
                with pytest.raises(BlockingIOError):
                    end.recv(64)
    finally:
        for end in itertools.chain.from_iterable(connections):
            end.close()
    await assert_connectivity(denied=between(others, web, "tcp/8001"))


async def connect(source: Pod, target: Pod, family: int) -> tuple[socket.socket, socket.socket]:
    """The client and server socket of a new connection."""
    loop = asyncio.get_running_loop()
    with target.place(family).listening(8001, TCP) as listener:
        sender = source.place(family).open_client(TCP)
        await soon(loop.sock_connect(sender, (str(target.address(family)), 8001)))
        receiver, _ = await soon(loop.sock_accept(listener))
    return sender, receiver


async def send(end: socket.socket, data: bytes) -> None:
    await soon(asyncio.get_running_loop().sock_sendall(end, data))


async def test_p4_allow_from_a_group(testbed: TenantFixture) -> None:
    await testbed.group("common")
    await testbed.policy("some", CLOSED, "-d in -g common -l tcp -P 8001 -p 100 -j allow")
    await testbed.group("web", "some")
    web, common, others = [await testbed.pods(group) for group in ("web", "common", "")]
    await assert_connectivity(
        allowed=between(common, web, "tcp/8001"),
        denied=[*between(common, web, "tcp/8002"), *between([*web, *others], web, "tcp/8001")],
    )


async def test_p5_allow_from_a_network(testbed: TenantFixture) -> None:
    needs_routing(testbed.lab)
    await testbed.policy("some", "-d in -n net -p 2 -j allow", "-d in -n other -p 2 -j deny")
    await testbed.group("web", "some")
    web, near, far = await testbed.pods("web"), await testbed.pods(), await testbed.pods(network="other")
    await assert_connectivity(
        allowed=[*between(near, web, "tcp/80", "udp/53", "icmp"), *between(web, far, "tcp/80")],
        denied=between(far, web, "tcp/80", "udp/53", "icmp"),
    )


async def test_p6_allow_from_an_address_and_from_a_prefix(testbed: TenantFixture) -> None:
    needs_routing(testbed.lab)
    await testbed.policy("some", CLOSED)
    await testbed.group("web", "some")
    web, [one, two] = await testbed.pods("web"), await testbed.pods()
    far = await testbed.pods(network="other")
    for family in FAMILIES:
        await testbed.rule("some", f"one{family}", f"-d in -i {one.address(family)} -l tcp -P 8001 -p 10 -j allow")
    await assert_connectivity(allowed=between([one], web, "tcp/8001"), denied=between([two, *far], web, "tcp/8001"))
    for family, prefix in ((4, "10.2.0.0/16"), (6, "2001:db8:2::/64")):
        await testbed.rule("some", f"all{family}", f"-d in -i {prefix} -l tcp -P 8001 -p 10 -j allow")
    await assert_connectivity(allowed=between([one, *far], web, "tcp/8001"), denied=between([two], web, "tcp/8001"))


async def test_p7_egress_rules(testbed: TenantFixture) -> None:
    needs_routing(testbed.lab)
    """Deny TCP egress, except to a port, a group, a network and an address."""
    await testbed.policy("some", "-d out -l tcp -p 1 -j deny")
    await testbed.group("common")
    await testbed.group("web", "some")
    web, common, others = [await testbed.pods(group) for group in ("web", "common", "")]
    far = await testbed.pods(network="other")
    everyone = [*common, *others, *far]
    await assert_connectivity(
        allowed=[*between(web, everyone, "udp/53"), *between(everyone, web, "tcp/80")],
        denied=between(web, everyone, "tcp/80"),
    )
    await testbed.rule("some", "port", "-d out -l tcp -P 8000 -p 10 -j allow")
    await assert_connectivity(allowed=between(web, everyone, "tcp/8000"), denied=between(web, everyone, "tcp/80"))
    await testbed.rule("some", "group", "-d out -e common -l tcp -P 80 -p 10 -j allow")
    await assert_connectivity(allowed=between(web, common, "tcp/80"), denied=between(web, [*others, *far], "tcp/80"))
    await testbed.rule("some", "network", "-d out -o other -l tcp -P 80 -p 10 -j allow")
    await assert_connectivity(allowed=between(web, [*common, *far], "tcp/80"), denied=between(web, others, "tcp/80"))
    for family in FAMILIES:
        await testbed.rule("some", f"to{family}", f"-d out -s {others[0].address(family)} -l tcp -P 80 -p 10 -j allow")
    await assert_connectivity(allowed=between(web, others[:1], "tcp/80"), denied=between(web, others[1:], "tcp/80"))


async def test_p8_icmp(testbed: TenantFixture) -> None:
    """Denied, allowed from one address, and allowed again without the rule; neighbour discovery always works."""
    await testbed.policy("some", "-d in -l icmp -p 1 -j deny")
    await testbed.group("web", "some")
    web, [one, two] = await testbed.pods("web"), await testbed.pods()
    await assert_connectivity(allowed=between([one, two], web, "tcp/80"), denied=between([one, two], web, "icmp"))
    for family in FAMILIES:
        await testbed.rule("some", f"from{family}", f"-d in -i {one.address(family)} -l icmp -p 10 -j allow")
    await assert_connectivity(allowed=between([one], web, "icmp"), denied=between([two], web, "icmp"))
    await testbed.drop_rule("some", "1")
    await assert_connectivity(allowed=between([one, two], web, "icmp"))


async def test_p9_rules_apply_to_pods_created_before_and_after_them(testbed: TenantFixture) -> None:
    await testbed.policy("some")
    await testbed.group("web", "some")
    before, others = await testbed.pods("web"), await testbed.pods()
    await assert_connectivity(allowed=between(others, before, "tcp/80"))
    await testbed.rule("some", "1", CLOSED)
    await testbed.rule("some", "2", "-d in -l tcp -P 8000 -p 100 -j allow")
    after = await testbed.pods("web")
    web = [*before, *after]
    await assert_connectivity(allowed=between(others, web, "tcp/8000"), denied=between([*others, *web], web, "tcp/80"))


async def test_p10_change_the_policies_of_a_group_with_running_pods(testbed: TenantFixture) -> None:
    await testbed.policy("first", CLOSED)
    await testbed.policy("second", "-d in -l udp -p 1 -j deny")
    await testbed.group("web", "first")
    web, others = await testbed.pods("web"), await testbed.pods()
    await assert_connectivity(allowed=between(others, web, "udp/53"), denied=between(others, web, "tcp/80"))
    await testbed.group("web")
    await assert_connectivity(allowed=between(others, web, "udp/53", "tcp/80"))
    await testbed.group("web", "second")
    await assert_connectivity(allowed=between(others, web, "tcp/80"), denied=between(others, web, "udp/53"))
    await testbed.group("web", "first", "second")
    await assert_connectivity(allowed=between(others, web, "icmp"), denied=between(others, web, "tcp/80", "udp/53"))


async def test_w41_two_policies_of_a_group_with_the_same_rule(testbed: TenantFixture) -> None:
    """The rule applies until it is deleted from both."""
    for name in ("first", "second"):
        await testbed.policy(name, CLOSED)
    await testbed.group("web", "first", "second")
    web, others = await testbed.pods("web"), await testbed.pods()
    await assert_connectivity(allowed=between(others, web, "udp/53"), denied=between(others, web, "tcp/80"))
    await testbed.group("web", "second")
    await assert_connectivity(allowed=between(others, web, "udp/53"), denied=between(others, web, "tcp/80"))
    await testbed.group("web")
    await assert_connectivity(allowed=between(others, web, "udp/53", "tcp/80"))


async def test_p11_policy_survives_restarts_of_agents_and_master(testbed: TenantFixture) -> None:
    """Changes during the restart apply afterwards. Several masters: scenarios T2 and T8."""
    await testbed.policy("some", CLOSED)
    await testbed.group("web", "some")
    web, others = await testbed.pods("web"), await testbed.pods()
    passing, refused = [*between(others, web, "udp/53")], [*between(others, web, "tcp/80")]
    await assert_connectivity(allowed=passing, denied=refused)  # now both nodes know all endpoints
    for host in testbed.lab.hosts.values():
        host.kill()
        await assert_connectivity(allowed=passing, denied=refused)
        await testbed.rule("some", host.name, "-d in -l tcp -P 8000 -p 100 -j allow", wait="")
        await host.start()
        await assert_connectivity(allowed=passing, denied=refused)
    testbed.lab.master.kill()
    await assert_connectivity(allowed=passing, denied=refused)
    await testbed.lab.master.start()
    await testbed.rule("some", "last", "-d in -l tcp -P 8001 -p 100 -j allow")
    await assert_connectivity(allowed=[*passing, *between(others, web, "tcp/8000", "tcp/8001")], denied=refused)
