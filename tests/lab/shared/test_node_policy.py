"""Contiv's policy scenarios (contiv 10.5: P1 to P11) with real agents and packets, written by netctl as a user does it.

Each is asked on one host and between two, in IPv4 and IPv6. Every test has a tenant of its own in a lab for all.
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

# Contiv's usual beginning: no TCP, until a rule of a higher priority allows some.
CLOSED = "-d in -l tcp -p 1 -j deny"


async def test_p1_a_policy_without_rules_leaves_all_open(town: TenantFixture) -> None:
    await town.policy("empty")
    await town.group("web", "empty")
    web, others = await town.pods("web"), await town.pods()
    await assert_connectivity(
        passing=[*between(web, web, "tcp/80", "icmp"), *between(others, web, "tcp/80", "udp/53", "icmp")]
    )


async def test_p2_one_port_is_open_and_the_others_are_not(town: TenantFixture) -> None:
    """What no rule speaks of is open: Contiv's default is to allow."""
    await town.policy("some", CLOSED, "-d in -l tcp -P 8000 -p 100 -j allow")
    await town.group("web", "some")
    web, others = await town.pods("web"), await town.pods()
    everyone = [*web, *others]
    await assert_connectivity(
        passing=[*between(everyone, web, "tcp/8000", "udp/8001", "icmp"), *between(web, others, "tcp/8001")],
        refused=between(everyone, web, "tcp/8001", "tcp/80"),
    )


async def test_p3_a_rule_that_comes_opens_and_one_that_goes_cuts(town: TenantFixture) -> None:
    """Those that are there already are affected at once, and so are their connections."""
    await town.policy("some", CLOSED)
    await town.group("web", "some")
    web, others = await town.pods("web"), await town.pods()
    await assert_connectivity(refused=between(others, web, "tcp/8001"))
    await town.rule("some", "2", "-d in -l tcp -P 8001 -p 100 -j allow")
    await assert_connectivity(passing=between(others, web, "tcp/8001"))
    lines = [await connect(a, b, family) for a, b, family in itertools.product(others, web, FAMILIES)]
    try:
        for mouth, ear in lines:
            await say(mouth, b"before")
            assert await soon(asyncio.get_running_loop().sock_recv(ear, 64)) == b"before"
        await town.drop_rule("some", "2")
        for mouth, ear in lines:
            await say(mouth, b"meanwhile")
            await say(ear, b"from the other side")
        await asyncio.sleep(SILENCE_S)
        for line in lines:
            for end in line:
                with pytest.raises(BlockingIOError):
                    end.recv(64)
    finally:
        for end in itertools.chain.from_iterable(lines):
            end.close()
    await assert_connectivity(refused=between(others, web, "tcp/8001"))


async def connect(source: Pod, target: Pod, family: int) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    loop = asyncio.get_running_loop()
    with target.place(family).listening(8001, TCP) as listener:
        mouth = source.place(family).open_caller(TCP)
        await soon(loop.sock_connect(mouth, (str(target.address(family)), 8001)))
        ear, _ = await soon(loop.sock_accept(listener))
    return mouth, ear


async def say(end: socket.socket, word: bytes) -> None:
    await soon(asyncio.get_running_loop().sock_sendall(end, word))


async def test_p4_one_group_may_and_the_others_may_not(town: TenantFixture) -> None:
    await town.group("common")
    await town.policy("some", CLOSED, "-d in -g common -l tcp -P 8001 -p 100 -j allow")
    await town.group("web", "some")
    web, common, others = [await town.pods(group) for group in ("web", "common", "")]
    await assert_connectivity(
        passing=between(common, web, "tcp/8001"),
        refused=[*between(common, web, "tcp/8002"), *between([*web, *others], web, "tcp/8001")],
    )


async def test_p5_one_network_may_and_the_other_may_not(town: TenantFixture) -> None:
    needs_routing(town.lab)
    await town.policy("some", "-d in -n net -p 2 -j allow", "-d in -n other -p 2 -j deny")
    await town.group("web", "some")
    web, near, far = await town.pods("web"), await town.pods(), await town.pods(network="other")
    await assert_connectivity(
        passing=[*between(near, web, "tcp/80", "udp/53", "icmp"), *between(web, far, "tcp/80")],
        refused=between(far, web, "tcp/80", "udp/53", "icmp"),
    )


async def test_p6_from_an_address_and_from_a_range(town: TenantFixture) -> None:
    needs_routing(town.lab)
    await town.policy("some", CLOSED)
    await town.group("web", "some")
    web, [one, two] = await town.pods("web"), await town.pods()
    far = await town.pods(network="other")
    for family in FAMILIES:
        await town.rule("some", f"one{family}", f"-d in -i {one.address(family)} -l tcp -P 8001 -p 10 -j allow")
    await assert_connectivity(passing=between([one], web, "tcp/8001"), refused=between([two, *far], web, "tcp/8001"))
    for family, prefix in ((4, "10.2.0.0/16"), (6, "2001:db8:2::/64")):
        await town.rule("some", f"all{family}", f"-d in -i {prefix} -l tcp -P 8001 -p 10 -j allow")
    await assert_connectivity(passing=between([one, *far], web, "tcp/8001"), refused=between([two], web, "tcp/8001"))


async def test_p7_what_a_group_may_say(town: TenantFixture) -> None:
    needs_routing(town.lab)
    """Out: deny tcp, but a port, to a group, to a network, to an address."""
    await town.policy("some", "-d out -l tcp -p 1 -j deny")
    await town.group("common")
    await town.group("web", "some")
    web, common, others = [await town.pods(group) for group in ("web", "common", "")]
    far = await town.pods(network="other")
    everyone = [*common, *others, *far]
    await assert_connectivity(
        passing=[*between(web, everyone, "udp/53"), *between(everyone, web, "tcp/80")],
        refused=between(web, everyone, "tcp/80"),
    )
    await town.rule("some", "port", "-d out -l tcp -P 8000 -p 10 -j allow")
    await assert_connectivity(passing=between(web, everyone, "tcp/8000"), refused=between(web, everyone, "tcp/80"))
    await town.rule("some", "group", "-d out -e common -l tcp -P 80 -p 10 -j allow")
    await assert_connectivity(passing=between(web, common, "tcp/80"), refused=between(web, [*others, *far], "tcp/80"))
    await town.rule("some", "network", "-d out -o other -l tcp -P 80 -p 10 -j allow")
    await assert_connectivity(passing=between(web, [*common, *far], "tcp/80"), refused=between(web, others, "tcp/80"))
    for family in FAMILIES:
        await town.rule("some", f"to{family}", f"-d out -s {others[0].address(family)} -l tcp -P 80 -p 10 -j allow")
    await assert_connectivity(passing=between(web, others[:1], "tcp/80"), refused=between(web, others[1:], "tcp/80"))


async def test_p8_icmp(town: TenantFixture) -> None:
    """Denied, allowed from one address, and open again without the rule; neighbours are found all the while."""
    await town.policy("some", "-d in -l icmp -p 1 -j deny")
    await town.group("web", "some")
    web, [one, two] = await town.pods("web"), await town.pods()
    await assert_connectivity(passing=between([one, two], web, "tcp/80"), refused=between([one, two], web, "icmp"))
    for family in FAMILIES:
        await town.rule("some", f"from{family}", f"-d in -i {one.address(family)} -l icmp -p 10 -j allow")
    await assert_connectivity(passing=between([one], web, "icmp"), refused=between([two], web, "icmp"))
    await town.drop_rule("some", "1")
    await assert_connectivity(passing=between([one, two], web, "icmp"))


async def test_p9_before_and_after_make_no_difference(town: TenantFixture) -> None:
    await town.policy("some")
    await town.group("web", "some")
    before, others = await town.pods("web"), await town.pods()
    await assert_connectivity(passing=between(others, before, "tcp/80"))
    await town.rule("some", "1", CLOSED)
    await town.rule("some", "2", "-d in -l tcp -P 8000 -p 100 -j allow")
    after = await town.pods("web")
    web = [*before, *after]
    await assert_connectivity(passing=between(others, web, "tcp/8000"), refused=between([*others, *web], web, "tcp/80"))


async def test_p10_policies_of_a_group_that_is_in_use(town: TenantFixture) -> None:
    await town.policy("first", CLOSED)
    await town.policy("second", "-d in -l udp -p 1 -j deny")
    await town.group("web", "first")
    web, others = await town.pods("web"), await town.pods()
    await assert_connectivity(passing=between(others, web, "udp/53"), refused=between(others, web, "tcp/80"))
    await town.group("web")
    await assert_connectivity(passing=between(others, web, "udp/53", "tcp/80"))
    await town.group("web", "second")
    await assert_connectivity(passing=between(others, web, "tcp/80"), refused=between(others, web, "udp/53"))
    await town.group("web", "first", "second")
    await assert_connectivity(passing=between(others, web, "icmp"), refused=between(others, web, "tcp/80", "udp/53"))


async def test_w41_policies_of_a_group_may_have_the_same_rule(town: TenantFixture) -> None:
    """It holds for as long as one of them is there."""
    for name in ("first", "second"):
        await town.policy(name, CLOSED)
    await town.group("web", "first", "second")
    web, others = await town.pods("web"), await town.pods()
    await assert_connectivity(passing=between(others, web, "udp/53"), refused=between(others, web, "tcp/80"))
    await town.group("web", "second")
    await assert_connectivity(passing=between(others, web, "udp/53"), refused=between(others, web, "tcp/80"))
    await town.group("web")
    await assert_connectivity(passing=between(others, web, "udp/53", "tcp/80"))


async def test_p11_policy_survives_restarts_of_agents_and_master(town: TenantFixture) -> None:
    """Changes that came meanwhile are in force afterwards. With several masters: scenarios T2 and T8."""
    await town.policy("some", CLOSED)
    await town.group("web", "some")
    web, others = await town.pods("web"), await town.pods()
    passing, refused = [*between(others, web, "udp/53")], [*between(others, web, "tcp/80")]
    await assert_connectivity(passing=passing, refused=refused)  # by now both nodes have heard of all
    for host in town.lab.hosts.values():
        host.kill()
        await assert_connectivity(passing=passing, refused=refused)
        await town.rule("some", host.name, "-d in -l tcp -P 8000 -p 100 -j allow", wait="")
        await host.start()
        await assert_connectivity(passing=passing, refused=refused)
    town.lab.master.kill()
    await assert_connectivity(passing=passing, refused=refused)
    await town.lab.master.start()
    await town.rule("some", "last", "-d in -l tcp -P 8001 -p 100 -j allow")
    await assert_connectivity(passing=[*passing, *between(others, web, "tcp/8000", "tcp/8001")], refused=refused)
