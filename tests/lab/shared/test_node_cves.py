"""CVEs of other projects, tested on our nodes: start-up, restarts, IP families, fragments, spoofing.

Those about names, selectors and precedence are in `tests/unit/domain/policy/engine/test_cves.py`.
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
from tests.support.forbidden_traffic import ForbiddenTraffic
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

CLOSED = 6000
DENIED = "-d in -p 1 -j deny"
KINDS = {4: socket.AF_INET, 6: socket.AF_INET6}
_ROUTER_ADVERTISEMENT, _REDIRECT = 134, 137
_VXLAN_PORT = 4789


async def closed_group(testbed: TenantFixture, *rules: str) -> list[Pod]:
    """Pods with all ingress denied, except by these rules."""
    await testbed.policy("closed", DENIED, *rules)
    await testbed.group("closed", "closed")
    return await testbed.pods("closed")


async def test_cve_2023_27595_policy_is_enforced_while_the_agent_restarts(testbed: TenantFixture) -> None:
    closed, others = await closed_group(testbed), await testbed.pods()
    with ForbiddenTraffic(others, closed, port=CLOSED) as traffic:
        for host in testbed.lab.hosts.values():
            host.kill()
            await traffic.wait_for_more_packets()
            await host.start()
            await traffic.wait_for_more_packets()
        assert traffic.arrived == 0
        await testbed.drop_rule("closed", "1")
        await until(lambda: traffic.arrived > 0)  # so it was the rule that dropped them


async def test_cve_2024_42488_an_agent_with_partial_state_opens_nothing(testbed: TenantFixture) -> None:
    """It starts while the store is down: installed policy stays enforced, and ADD fails until the state is complete."""
    closed, others = await closed_group(testbed), await testbed.pods()
    two = testbed.lab.hosts["two"]
    with ForbiddenTraffic(others, closed, port=CLOSED) as traffic:
        await two.store_proxy.block()
        two.kill()
        two.launch()
        await until(lambda: is_listening(two))
        adding = asyncio.create_task(testbed.pod(two, "closed"))
        await traffic.wait_for_more_packets()
        two.store_proxy.unblock()
        late = await soon(adding)
        await two.ready()
        await traffic.wait_for_more_packets()
        assert traffic.arrived == 0
    await assert_connectivity(denied=between(others, [*closed, late], "tcp/80", "udp/53", "icmp"))


def is_listening(host: Host) -> bool:
    """Whether the agent accepts connections."""
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(str(host.socket)) == 0


async def test_cve_2024_7598_rules_are_enforced_until_the_last_port_is_removed(testbed: TenantFixture) -> None:
    """Policy, group, network and tenant of a pod cannot be deleted; policy is enforced during its DEL."""
    closed, others = await closed_group(testbed), await testbed.pods()
    tenant = testbed.tenant
    with ForbiddenTraffic(others, closed, port=CLOSED) as traffic:
        for plural, key in (
            ("policys", f"{tenant}:closed"),
            ("endpointGroups", f"{tenant}:closed"),
            ("networks", f"{tenant}:net"),
            ("tenants", tenant),
        ):
            (await testbed.lab.rest.delete(plural, key)).refused(409)
        for pod in closed:
            await pod.detach()
        await traffic.wait_for_more_packets()
        assert traffic.arrived == 0


@pytest.mark.parametrize("destination", ["neighbour", "everyone"])
async def test_cve_2020_10749_router_messages_of_pods_are_dropped(testbed: TenantFixture, destination: str) -> None:
    """CVE-2020-11091, CVE-2020-13597 too. An echo request on the same path passes."""
    [a, b] = await testbed.pods()
    near = await testbed.pod(a.host)
    await assert_connectivity(allowed=between([a], [b, near], "icmp"))
    before = default_routes(a)
    protocol = socket.getprotobyname("ipv6-icmp")
    with (
        Tap(b.namespace) as far_tap,
        Tap(near.namespace) as near_tap,
        a.namespace.open_socket(socket.AF_INET6, socket.SOCK_RAW, protocol) as sender,
    ):
        sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 255)
        sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        targets = [str(b.address(6)), str(near.address(6))] if destination == "neighbour" else ["ff02::1%eth0"]
        index = sender_ifindex(a)
        for target, kind in itertools.product(targets, (_ROUTER_ADVERTISEMENT, _REDIRECT)):
            words = struct.pack("!BBHBBHII", kind, 0, 0, 64, 0, 1800, 0, 0)
            sender.sendto(words, (target.partition("%")[0], 0, 0, index if "%" in target else 0))
        # A fixed observation window: the absence of a packet is no event to wait for.
        await asyncio.sleep(SILENCE_S)
        source = parse_address(str(a.address(6)), field="source")
        for tap in (far_tap, near_tap):
            assert not [each for each in tap.packets() if each.source == source]
    assert default_routes(a) == before


def sender_ifindex(pod: Pod) -> int:
    """The ifindex of a pod's interface."""
    return int(inventory.run_json(pod.netns, "ip", "-j", "link", "show", "eth0")[0]["ifindex"])


def default_routes(pod: Pod) -> list[object]:
    """The IPv6 default routes in the tenant netns of the pod and on its host."""
    tenant = dict(pod.attachment.args)["io.contiv.tenant"]
    places = [pod.host.netns] if pod.host.switch else [pod.host.tenants.path / tenant, pod.host.netns]
    return [inventory.run_json(place, "ip", "-j", "-6", "route", "show", "default") for place in places]


async def test_cve_2024_32473_no_ipv6_in_an_ipv4_network(testbed: TenantFixture) -> None:
    """Neither with link-local addresses nor with addresses that a pod adds."""
    await testbed.netctl(f"network create old -t {testbed.tenant} --encap vxlan --subnet 10.4.0.0/16")
    a, b = await testbed.pods(network="old")
    near = await testbed.pod(a.host, network="old")
    for number, pod in enumerate((a, b, near), start=1):
        inventory.run(pod.netns, "sysctl -qw net.ipv6.conf.eth0.disable_ipv6=0")
        inventory.run(pod.netns, f"ip addr add 2001:db8:4::{number}/64 dev eth0 nodad")
    with (
        Tap(b.namespace) as far_tap,
        Tap(near.namespace) as near_tap,
        a.namespace.open_socket(socket.AF_INET6, socket.SOCK_DGRAM) as sender,
    ):
        index = sender_ifindex(a)
        for address in ("2001:db8:4::2", "2001:db8:4::3", "ff02::1"):
            sender.sendto(b"?", (address, CLOSED, 0, index if address.startswith("ff") else 0))
        # A fixed observation window: the absence of a packet is no event to wait for.
        await asyncio.sleep(SILENCE_S)
        assert not [each for tap in (far_tap, near_tap) for each in tap.packets() if each.target_port == CLOSED]


async def test_cve_2023_27594_no_family_or_protocol_bypasses_policy(testbed: TenantFixture) -> None:
    """GHSA-c66w-hq56-4q97 too: TCP, UDP, ICMP, and protocols that rules cannot match."""
    closed, others = await closed_group(testbed), await testbed.pods()
    await assert_connectivity(
        allowed=between(closed, others, "tcp/80", "udp/53", "icmp"),
        denied=between(others, closed, "tcp/80", "udp/53", "icmp"),
    )
    for protocol, family in itertools.product((47, 50, 99), FAMILIES):
        for source, target in itertools.product(others, closed):
            assert not await arrives(source, target, protocol=protocol, family=family)
            assert await arrives(target, source, protocol=protocol, family=family)


async def arrives(source: Pod, target: Pod, *, protocol: int, family: int) -> bool:
    """Whether a raw packet of a protocol arrives at a pod."""
    source_address = parse_address(str(source.address(family)), field="source")
    with (
        Tap(target.namespace) as tap,
        source.namespace.open_socket(KINDS[family], socket.SOCK_RAW, protocol) as sender,
    ):
        sender.bind((str(source.address(family)), 0))
        sender.sendto(bytes(32), (str(target.address(family)), 0))
        for _ in range(10):
            if any((each.source, each.protocol) == (source_address, protocol) for each in tap.packets()):
                return True
            await asyncio.sleep(SILENCE_S / 10)  # polls the tap during the window
    return False


@pytest.mark.parametrize("family", FAMILIES)
async def test_fragments_do_not_bypass_policy(testbed: TenantFixture, family: int) -> None:
    """Fragmented datagrams get the verdict of the datagram; a single fragment is dropped."""
    closed = await closed_group(testbed, "-d in -l udp -P 5000 -p 2 -j allow")
    others = await testbed.pods()
    for source, target in itertools.product(others, closed):
        where = str(target.address(family))
        with (
            target.place(family).listening(5000, UDP) as listener,
            source.place(family).open_client(UDP) as sender,
            Tap(target.namespace) as tap,
        ):
            sender.sendto(b"x" * 4000, (where, 5000))
            assert len(await soon(asyncio.get_running_loop().sock_recv(listener, 5000))) == 4000
            tap.packets()
            sender.sendto(b"x" * 4000, (where, CLOSED))
            if family == 4:
                send_non_first_fragment(source, target)
            # A fixed observation window: the absence of a packet is no event to wait for.
            await asyncio.sleep(SILENCE_S)
            source_address = parse_address(str(source.address(family)), field="source")
            assert not [each for each in tap.packets() if each.source == source_address]


def send_non_first_fragment(source: Pod, target: Pod) -> None:
    """Send a fragment without its first fragment, so without a port number."""
    header = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 60, 77, 185, 64, 17, 0, source.address().packed, target.address().packed
    )
    with source.namespace.open_socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sender:
        sender.sendto(header + bytes(40), (str(target.address()), 0))


@pytest.mark.parametrize("family", FAMILIES)
async def test_an_allowed_address_cannot_be_spoofed(testbed: TenantFixture, family: int) -> None:
    """A pod that spoofs an allowed address is dropped on its own host and on another one."""
    await testbed.group("friend")
    closed = await closed_group(testbed, "-d in -g friend -p 2 -j allow")
    allowed_pods, foes = await testbed.pods("friend"), await testbed.pods()
    await assert_connectivity(allowed=between(allowed_pods, closed, "udp/53"), denied=between(foes, closed, "udp/53"))
    for attacker, friend in itertools.product(foes, allowed_pods):
        spoofed = str(friend.address(family))
        length, more = (32, "") if family == 4 else (128, " nodad")
        inventory.run(attacker.netns, f"ip addr add {spoofed}/{length} dev eth0{more}")
        with attacker.namespace.open_socket(KINDS[family], socket.SOCK_DGRAM) as sender:
            sender.bind((spoofed, 0))
            assert not await any_receives(sender, closed, family=family)
        inventory.run(attacker.netns, f"ip addr del {spoofed}/{length} dev eth0")


async def any_receives(sender: socket.socket, targets: Sequence[Pod], *, family: int) -> bool:
    """Whether a packet from a socket arrives at one of the pods."""
    taps = [Tap(target.namespace) for target in targets]
    try:
        for target in targets:
            sender.sendto(b"?", (str(target.address(family)), CLOSED))
        # A fixed observation window: the absence of a packet is no event to wait for.
        await asyncio.sleep(SILENCE_S)
        return any(each.target_port == CLOSED for tap in taps for each in tap.packets())
    finally:
        for tap in taps:
            tap.__exit__(None, None, None)


async def test_cve_2025_54388_rules_are_restored_after_a_firewall_reload(testbed: TenantFixture) -> None:
    """CVE-2025-54410 too: another process flushes the tenant netns on an otherwise idle node."""
    if testbed.lab.datapath == "ovs":
        pytest.skip("Open vSwitch has no nftables rules to flush")
    closed, others = await closed_group(testbed), await testbed.pods()
    namespaces = [pod.host.tenants.path / testbed.tenant for pod in closed]
    addresses = {str(pod.address()) for pod in (*closed, *others)}
    await until(lambda: all(addresses <= identities_in(namespace) for namespace in namespaces))
    before = [count_rules(namespace) for namespace in namespaces]
    for namespace in namespaces:
        inventory.run(namespace, "nft flush ruleset")
    # There may be more than before: the last endpoint may be learned after the flush on a busy machine.
    await until(
        lambda: not any(was - count_rules(namespace) for was, namespace in zip(before, namespaces, strict=True))
    )
    await assert_connectivity(
        allowed=between(closed, others, "tcp/80"), denied=between(others, closed, "tcp/80", "udp/53", "icmp")
    )


def identities_in(namespace: Path) -> set[str]:
    """The IPv4 addresses with an identity in a namespace."""
    (listed,) = (
        each["map"]
        for each in inventory.run_json(namespace, "nft", "-j", "list", "map", "inet", "weft", "ip_identity_src4")[
            "nftables"
        ]
        if "map" in each
    )
    return {address for address, _ in listed.get("elem", ())}


def count_rules(namespace: Path) -> Counter[tuple[str, ...]]:
    """The number of rules per chain and of elements per set and map in a namespace."""
    found: Counter[tuple[str, ...]] = Counter()
    for each in inventory.run_json(namespace, "nft", "-j", "list", "ruleset")["nftables"]:
        for kind, value in each.items():
            if kind in {"set", "map"}:
                found[kind, value["name"]] = len(value.get("elem", ()))
            elif kind == "rule":
                found[kind, value["chain"]] += 1
    return found


async def test_cve_2025_64715_an_empty_group_matches_nothing(testbed: TenantFixture) -> None:
    """Before its first member and after its last."""
    await testbed.group("friend")
    closed = await closed_group(testbed, "-d in -g friend -p 2 -j allow")
    others = await testbed.pods()
    await assert_connectivity(denied=between(others, closed, "tcp/80"))
    allowed_pods = await testbed.pods("friend")
    await assert_connectivity(allowed=between(allowed_pods, closed, "tcp/80"), denied=between(others, closed, "tcp/80"))
    for friend in allowed_pods:
        await friend.remove()
    await assert_connectivity(denied=between(others, closed, "tcp/80"))


async def test_cve_2021_32575_tenants_with_overlapping_subnets_do_not_mix(
    testbed: TenantFixture, make_tenant: Callable[[], TenantFixture]
) -> None:
    neighbours = make_tenant()
    await neighbours.build()
    ours, theirs = await testbed.pods(), await neighbours.pods()
    await assert_connectivity(allowed=[*between(ours, ours, "tcp/80"), *between(theirs, theirs, "tcp/80")])
    taken = {str(pod.address(family)) for pod in ours for family in FAMILIES}
    for source, target, family in itertools.product(ours, theirs, FAMILIES):
        if str(target.address(family)) in taken:
            continue  # the tenant itself has a pod with that address
        with source.place(family).open_client(UDP) as sender:
            assert not await any_receives(sender, [target], family=family)


async def test_vxlan_packets_of_pods_do_not_reach_a_vtep(testbed: TenantFixture) -> None:
    """They never arrive at another node's tunnel port as if a node had sent them."""
    [a, b] = await testbed.pods()
    many = 200
    with Namespace.open(b.host.netns) as machine, Tap(machine) as tap, a.place().open_client(UDP) as sender:
        for _ in range(many):
            with suppress(OSError):  # no route at all
                sender.sendto(struct.pack("!II", 1 << 27, 1 << 8) + bytes(60), (b.host.address, _VXLAN_PORT))
        # A fixed observation window: the absence of a packet is no event to wait for.
        await asyncio.sleep(SILENCE_S)
        assert sum(each.target_port == _VXLAN_PORT for each in tap.packets()) < many / 2, (
            "only the nodes' own VXLAN packets"
        )
