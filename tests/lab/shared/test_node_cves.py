"""CVEs of other projects, tried on our nodes: start windows, restarts, families, fragments, forgery.

Rows about names, selectors and precedence are in `tests/unit/domain/policy/engine/test_cves.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support import inventory
from tests.support.connectivity import FAMILIES, SILENCE_S, assert_connectivity, between
from tests.support.flood import Tap
from tests.support.forbidden_traffic import Fire
from tests.support.modes import TOWNS_ON_ALL
from tests.support.tenant_fixture import TenantFixture

from weft.domain.addresses import parse_address
from weft.kernel.netns import Namespace
from weft.lab.hosts import Host, Pod
from weft.lab.traffic import UDP
from weft.lab.waiting import soon, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    TOWNS_ON_ALL,
]

SHUT = 6000
DENIED = "-d in -p 1 -j deny"
KINDS = {4: socket.AF_INET, 6: socket.AF_INET6}
_ROUTER_ADVERTISEMENT, _REDIRECT = 134, 137
_VXLAN_PORT = 4789


async def closed_group(town: TenantFixture, *rules: str) -> list[Pod]:
    """Pods to which nobody may speak, but for what further rules say."""
    await town.policy("closed", DENIED, *rules)
    await town.group("closed", "closed")
    return await town.pods("closed")


async def test_cve_2023_27595_filters_stay_while_the_agent_restarts(town: TenantFixture) -> None:
    closed, others = await closed_group(town), await town.pods()
    with Fire(others, closed, port=SHUT) as fire:
        for host in town.lab.hosts.values():
            host.kill()
            await fire.burns()
            await host.start()
            await fire.burns()
        assert fire.arrived == 0
        await town.drop_rule("closed", "1")
        await until(lambda: fire.arrived > 0)  # it was the rule that kept them off


async def test_cve_2024_42488_nothing_is_opened_by_an_agent_that_knows_only_a_part(town: TenantFixture) -> None:
    """It starts while the store is away: what was in force stays so, and nobody comes before all is known."""
    closed, others = await closed_group(town), await town.pods()
    two = town.lab.hosts["two"]
    with Fire(others, closed, port=SHUT) as fire:
        await two.door.shut()
        two.kill()
        two.launch()
        await until(lambda: listens(two))
        adding = asyncio.create_task(town.pod(two, "closed"))
        await fire.burns()
        two.door.open()
        late = await soon(adding)
        await two.ready()
        await fire.burns()
        assert fire.arrived == 0
    await assert_connectivity(refused=between(others, [*closed, late], "tcp/80", "udp/53", "icmp"))


def listens(host: Host) -> bool:
    """Whether the agent can be called."""
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(str(host.socket)) == 0


async def test_cve_2024_7598_rules_stay_until_the_last_port_is_gone(town: TenantFixture) -> None:
    """Neither policy nor group, network or tenant can be deleted under a pod; and while one leaves it is policed."""
    closed, others = await closed_group(town), await town.pods()
    tenant = town.tenant
    with Fire(others, closed, port=SHUT) as fire:
        for plural, key in (
            ("policys", f"{tenant}:closed"),
            ("endpointGroups", f"{tenant}:closed"),
            ("networks", f"{tenant}:net"),
            ("tenants", tenant),
        ):
            (await town.lab.rest.delete(plural, key)).refused(409)
        for pod in closed:
            await pod.detach()
        await fire.burns()
        assert fire.arrived == 0


@pytest.mark.parametrize("destination", ["neighbour", "everyone"])
async def test_cve_2020_10749_no_pod_is_believed_to_be_a_router(town: TenantFixture, destination: str) -> None:
    """CVE-2020-11091, CVE-2020-13597 too. An echo request on the same road passes: it is these that are refused."""
    [a, b] = await town.pods()
    near = await town.pod(a.host)
    await assert_connectivity(passing=between([a], [b, near], "icmp"))
    before = default_routes(a)
    protocol = socket.getprotobyname("ipv6-icmp")
    with (
        Tap(b.namespace) as far_tap,
        Tap(near.namespace) as near_tap,
        a.namespace.open_socket(socket.AF_INET6, socket.SOCK_RAW, protocol) as mouth,
    ):
        mouth.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 255)
        mouth.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        targets = [str(b.address(6)), str(near.address(6))] if destination == "neighbour" else ["ff02::1%eth0"]
        index = mouth_index(a)
        for target, kind in itertools.product(targets, (_ROUTER_ADVERTISEMENT, _REDIRECT)):
            words = struct.pack("!BBHBBHII", kind, 0, 0, 64, 0, 1800, 0, 0)
            mouth.sendto(words, (target.partition("%")[0], 0, 0, index if "%" in target else 0))
        await asyncio.sleep(SILENCE_S)
        source = parse_address(str(a.address(6)), field="source")
        for tap in (far_tap, near_tap):
            assert not [each for each in tap.seen() if each.source == source]
    assert default_routes(a) == before


def mouth_index(pod: Pod) -> int:
    """The number of a pod's interface."""
    return int(inventory.ask(pod.netns, "ip", "-j", "link", "show", "eth0")[0]["ifindex"])


def default_routes(pod: Pod) -> list[object]:
    """Those of IPv6, where its packets go first: in the tenant's space on its host, and on the host itself."""
    tenant = dict(pod.attachment.args)["io.contiv.tenant"]
    places = [pod.host.machine] if pod.host.switch else [pod.host.tenants.path / tenant, pod.host.machine]
    return [inventory.ask(place, "ip", "-j", "-6", "route", "show", "default") for place in places]


async def test_cve_2024_32473_no_ipv6_where_the_network_has_none(town: TenantFixture) -> None:
    """Neither by the addresses a kernel gives itself nor by some that a pod takes."""
    await town.netctl(f"network create old -t {town.tenant} --encap vxlan --subnet 10.4.0.0/16")
    a, b = await town.pods(network="old")
    near = await town.pod(a.host, network="old")
    for number, pod in enumerate((a, b, near), start=1):
        inventory.run(pod.netns, "sysctl -qw net.ipv6.conf.eth0.disable_ipv6=0")
        inventory.run(pod.netns, f"ip addr add 2001:db8:4::{number}/64 dev eth0 nodad")
    with (
        Tap(b.namespace) as far_tap,
        Tap(near.namespace) as near_tap,
        a.namespace.open_socket(socket.AF_INET6, socket.SOCK_DGRAM) as mouth,
    ):
        index = mouth_index(a)
        for address in ("2001:db8:4::2", "2001:db8:4::3", "ff02::1"):
            mouth.sendto(b"?", (address, SHUT, 0, index if address.startswith("ff") else 0))
        await asyncio.sleep(SILENCE_S)
        assert not [each for tap in (far_tap, near_tap) for each in tap.seen() if each.target_port == SHUT]


async def test_cve_2023_27594_no_family_and_no_protocol_is_a_way_around(town: TenantFixture) -> None:
    """GHSA-c66w-hq56-4q97 too: TCP, UDP, ICMP, and protocols that no rule can name."""
    closed, others = await closed_group(town), await town.pods()
    await assert_connectivity(
        passing=between(closed, others, "tcp/80", "udp/53", "icmp"),
        refused=between(others, closed, "tcp/80", "udp/53", "icmp"),
    )
    for protocol, family in itertools.product((47, 50, 99), FAMILIES):
        for source, target in itertools.product(others, closed):
            assert not await arrives(source, target, protocol=protocol, family=family)
            assert await arrives(target, source, protocol=protocol, family=family)


async def arrives(source: Pod, target: Pod, *, protocol: int, family: int) -> bool:
    """Whether a bare packet of a protocol comes to a pod."""
    asks = parse_address(str(source.address(family)), field="source")
    with (
        Tap(target.namespace) as tap,
        source.namespace.open_socket(KINDS[family], socket.SOCK_RAW, protocol) as mouth,
    ):
        mouth.bind((str(source.address(family)), 0))
        mouth.sendto(bytes(32), (str(target.address(family)), 0))
        for _ in range(10):
            if any((each.source, each.protocol) == (asks, protocol) for each in tap.seen()):
                return True
            await asyncio.sleep(SILENCE_S / 10)
    return False


@pytest.mark.parametrize("family", FAMILIES)
async def test_fragments_are_no_way_around(town: TenantFixture, family: int) -> None:
    """Whole datagrams in pieces are judged as what they are, and a piece alone is nothing."""
    closed = await closed_group(town, "-d in -l udp -P 5000 -p 2 -j allow")
    others = await town.pods()
    for source, target in itertools.product(others, closed):
        where = str(target.address(family))
        with (
            target.place(family).listening(5000, UDP) as ear,
            source.place(family).open_caller(UDP) as mouth,
            Tap(target.namespace) as tap,
        ):
            mouth.sendto(b"x" * 4000, (where, 5000))
            assert len(await soon(asyncio.get_running_loop().sock_recv(ear, 5000))) == 4000
            tap.seen()
            mouth.sendto(b"x" * 4000, (where, SHUT))
            if family == 4:
                send_second_piece(source, target)
            await asyncio.sleep(SILENCE_S)
            asks = parse_address(str(source.address(family)), field="source")
            assert not [each for each in tap.seen() if each.source == asks]


def send_second_piece(source: Pod, target: Pod) -> None:
    """A piece of a datagram whose first one never comes, to any port one likes to think of."""
    header = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 60, 77, 185, 64, 17, 0, source.address().packed, target.address().packed
    )
    with source.namespace.open_socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as mouth:
        mouth.sendto(header + bytes(40), (str(target.address()), 0))


@pytest.mark.parametrize("family", FAMILIES)
async def test_who_is_let_in_cannot_be_impersonated(town: TenantFixture, family: int) -> None:
    """With a friend's address a pod is not heard, on its own host or on another one."""
    await town.group("friend")
    closed = await closed_group(town, "-d in -g friend -p 2 -j allow")
    friends, foes = await town.pods("friend"), await town.pods()
    await assert_connectivity(passing=between(friends, closed, "udp/53"), refused=between(foes, closed, "udp/53"))
    for foe, friend in itertools.product(foes, friends):
        forged = str(friend.address(family))
        length, more = (32, "") if family == 4 else (128, " nodad")
        inventory.run(foe.netns, f"ip addr add {forged}/{length} dev eth0{more}")
        with foe.namespace.open_socket(KINDS[family], socket.SOCK_DGRAM) as mouth:
            mouth.bind((forged, 0))
            assert not await any_heard(mouth, closed, family=family)
        inventory.run(foe.netns, f"ip addr del {forged}/{length} dev eth0")


async def any_heard(mouth: socket.socket, targets: Sequence[Pod], *, family: int) -> bool:
    """Whether something from a socket comes to one of the pods."""
    taps = [Tap(target.namespace) for target in targets]
    try:
        for target in targets:
            mouth.sendto(b"?", (str(target.address(family)), SHUT))
        await asyncio.sleep(SILENCE_S)
        return any(each.target_port == SHUT for tap in taps for each in tap.seen())
    finally:
        for tap in taps:
            tap.__exit__(None, None, None)


async def test_cve_2025_54388_what_a_firewall_reload_removes_comes_back(town: TenantFixture) -> None:
    """CVE-2025-54410 too: in the tenant's namespace, by a foreign hand, on a node where nothing else happens."""
    if town.lab.datapath == "ovs":
        pytest.skip("it has no rules in a firewall that a reload could remove")
    closed, others = await closed_group(town), await town.pods()
    spaces = [pod.host.tenants.path / town.tenant for pod in closed]
    addresses = {str(pod.address()) for pod in (*closed, *others)}
    await until(lambda: all(addresses <= known_in(space) for space in spaces))
    before = [rules_in(space) for space in spaces]
    for space in spaces:
        inventory.run(space, "nft flush ruleset")
    # There may be more than before: on a busy machine the last workload is heard of when the rules are gone already.
    await until(lambda: not any(was - rules_in(space) for was, space in zip(before, spaces, strict=True)))
    await assert_connectivity(
        passing=between(closed, others, "tcp/80"), refused=between(others, closed, "tcp/80", "udp/53", "icmp")
    )


def known_in(space: Path) -> set[str]:
    """The v4 addresses of which a namespace knows who is there."""
    (listed,) = (
        each["map"]
        for each in inventory.ask(space, "nft", "-j", "list", "map", "inet", "weft", "who_asks4")["nftables"]
        if "map" in each
    )
    return {address for address, _ in listed.get("elem", ())}


def rules_in(space: Path) -> Counter[tuple[str, ...]]:
    """How many rules each chain of a namespace has, and how many elements each set and map."""
    found: Counter[tuple[str, ...]] = Counter()
    for each in inventory.ask(space, "nft", "-j", "list", "ruleset")["nftables"]:
        for kind, value in each.items():
            if kind in {"set", "map"}:
                found[kind, value["name"]] = len(value.get("elem", ()))
            elif kind == "rule":
                found[kind, value["chain"]] += 1
    return found


async def test_cve_2025_64715_a_group_without_members_is_nobody_and_not_everybody(town: TenantFixture) -> None:
    """Before the first one has come, and after the last one has left."""
    await town.group("friend")
    closed = await closed_group(town, "-d in -g friend -p 2 -j allow")
    others = await town.pods()
    await assert_connectivity(refused=between(others, closed, "tcp/80"))
    friends = await town.pods("friend")
    await assert_connectivity(passing=between(friends, closed, "tcp/80"), refused=between(others, closed, "tcp/80"))
    for friend in friends:
        await friend.remove()
    await assert_connectivity(refused=between(others, closed, "tcp/80"))


async def test_cve_2021_32575_tenants_with_the_same_addresses_are_apart(
    town: TenantFixture, found: Callable[[], TenantFixture]
) -> None:
    neighbours = found()
    await neighbours.build()
    ours, theirs = await town.pods(), await neighbours.pods()
    await assert_connectivity(passing=[*between(ours, ours, "tcp/80"), *between(theirs, theirs, "tcp/80")])
    taken = {str(pod.address(family)) for pod in ours for family in FAMILIES}
    for source, target, family in itertools.product(ours, theirs, FAMILIES):
        if str(target.address(family)) in taken:
            continue  # that address is also one of our own
        with source.place(family).open_caller(UDP) as mouth:
            assert not await any_heard(mouth, [target], family=family)


async def test_no_pod_sends_tunnel_packets_of_its_own(town: TenantFixture) -> None:
    """They never come to another node's tunnel port as if a node had sent them."""
    [a, b] = await town.pods()
    many = 200
    with Namespace.open(b.host.machine) as machine, Tap(machine) as tap, a.place().open_caller(UDP) as mouth:
        for _ in range(many):
            with suppress(OSError):  # there is no way to it at all
                mouth.sendto(struct.pack("!II", 1 << 27, 1 << 8) + bytes(60), (b.host.address, _VXLAN_PORT))
        await asyncio.sleep(SILENCE_S)
        assert sum(each.target_port == _VXLAN_PORT for each in tap.seen()) < many / 2, "the kernels say little else"
