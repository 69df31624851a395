"""The host, its pods and the world (contiv 6.5, 10.4): hosts have strict reverse path filters."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from tests.support import inventory, switch_inventory
from tests.support.modes import ALL_IN_SOAK, BRIDGE_IN_SOAK, ON_ALL, ON_OVS_AND_TAGS, ON_OVS_TOO, OVS_MODES_IN_SOAK

from weft.cni.errors import CniError
from weft.kernel.netlink.conntrack import read_connections
from weft.kernel.netlink.socket import NETFILTER, NetlinkSocket
from weft.kernel.netns import Namespace
from weft.lab import traffic
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.traffic import QUIET_S, TCP, UDP, IPAddress
from weft.lab.waiting import DEADLINE, eventually, soon, until

VXLAN_PORT = 4789
LOOPBACK = ip_address("127.0.0.1")
HOST_V6 = "2001:db8:ffff::1"
DUAL = {"subnet": "10.7.0.0/16", "ipv6Subnet": "2001:db8:7::/64"}


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


def own_place(host: Host, closing: ExitStack, family: int = 4) -> traffic.Place:
    """The host itself, by the address as which it speaks to pods."""
    namespace = closing.enter_context(Namespace.open(host.machine))
    v4 = ip_address(host.address)
    return traffic.Place(namespace, v4 if family == 4 else ip_address(f"fd77:6566:7400::{host.address}"))


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
@pytest.mark.parametrize("gateways", [{}, {"gateway": "10.7.0.1", "ipv6Gateway": "2001:db8:7::1"}])
async def test_hosts_and_pods_reach_each_other(lab: NetLab, closing: ExitStack, gateways: dict[str, str]) -> None:
    """H2, W35: hosts reach pods of their own and of other hosts, pods reach their host; with a gateway or without."""
    await lab.network("dual", **DUAL, **gateways)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    a, b = await asyncio.gather(one.pod("a", network="dual"), two.pod("b", network="dual"))
    for family in (4, 6):
        here = own_place(one, closing, family)
        assert await traffic.reaches(here, a.place(family), port=80), f"host to its pod, v{family}"
        assert await traffic.reaches(a.place(family), here, port=81), f"pod to its host, v{family}"
        for transport in (TCP, UDP):
            assert await traffic.reaches(here, b.place(family), port=82, transport=transport), (
                f"to another's, v{family}"
            )
    assert await a.reaches(b)


@OVS_MODES_IN_SOAK
async def test_hosts_keep_no_connections_of_tunnels(lab: NetLab, closing: ExitStack) -> None:
    """Not one in the table that a host has for all its connections, which would be full of them."""
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    a, b = await asyncio.gather(one.pod("a"), two.pod("b"))
    assert await a.reaches(b)
    assert await traffic.reaches(own_place(one, closing), own_place(two, closing), port=83)
    for host in (one, two):
        with Namespace.open(host.machine) as machine, NetlinkSocket(NETFILTER, namespace=machine) as netfilter:
            ports = {each.original.destination_port for each in read_connections(netfilter, family=4)}
        assert 83 in ports, "it keeps others"
        assert VXLAN_PORT not in ports


@ON_OVS_AND_TAGS
@BRIDGE_IN_SOAK
async def test_policy_knows_hosts(lab: NetLab, closing: ExitStack) -> None:
    """A pod that nobody may call is called by its own host, for kubelet's probes, and by no other host."""
    await lab.network("dual", **DUAL)
    (await lab.rest.put("policys", tenantName="default", policyName="closed")).accepted()
    rule = {"policyName": "closed", "ruleId": "1", "priority": 1, "direction": "in", "action": "deny"}
    (await lab.rest.put("rules", tenantName="default", **rule)).accepted()
    await lab.group("shut", network="dual", policies=["closed"])
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    pod, _ = await asyncio.gather(one.pod("a", network="dual", group="shut"), two.pod("b", network="dual"))
    for family in (4, 6):
        assert await traffic.reaches(own_place(one, closing, family), pod.place(family), port=80)
        assert await traffic.never_reaches(own_place(two, closing, family), pod.place(family), port=80)


@ALL_IN_SOAK
async def test_what_somebody_breaks_on_the_host_is_mended(lab: NetLab, closing: ExitStack) -> None:
    """Links, routes and rules, at a start; what a firewall flushes at once."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    pod = await one.pod("a", network="dual", portMappings=mapping(8080))
    whole = host_state(one)
    (link,) = [name for name in inventory.devices(one.machine) if name.startswith("wefth-")]
    for command in (f"ip link del {link}", "nft delete table inet weft_host", "ip route del 10.7.0.0/16"):
        one.kill()
        inventory.run(one.machine, command)
        assert host_state(one) != whole
        await one.start()
        assert host_state(one) == whole
    inventory.run(one.machine, "nft flush ruleset")
    await eventually(lambda: asyncio.to_thread(host_state, one), lambda found: found == whole)
    with pod.place().listening(80, TCP):
        assert await answers(outside(closing), one.address, 8080)


async def calls(source: traffic.Place, target: traffic.Place, *, port: int) -> str:
    """As whom the target sees a caller; it must get through."""
    loop = asyncio.get_running_loop()
    with target.listening(port, TCP) as listener, source.open_caller(TCP) as caller:
        async with asyncio.timeout(DEADLINE):
            connecting = asyncio.ensure_future(loop.sock_connect(caller, (str(target.address), port)))
            connection, (host, *_) = await loop.sock_accept(listener)
            with connection:
                await connecting
                await loop.sock_sendall(connection, b"?")
                assert await loop.sock_recv(caller, 1) == b"?"
    return str(host)


def outside(closing: ExitStack, family: int = 4) -> traffic.Place:
    """The lab itself, which is on the underlay and no host."""
    address = ip_address("192.0.2.254" if family == 4 else "2001:db8:ffff::254")
    return traffic.Place(closing.enter_context(Namespace.current()), address)


def give_v6(host: Host) -> None:
    """A host's place on an underlay of IPv6, and the lab's."""
    inventory.run(host.machine, f"ip addr add {HOST_V6}/64 dev eth0 nodad")
    subprocess.run(
        ["ip", "addr", "add", "2001:db8:ffff::254/64", "dev", "underlay", "nodad"], check=True, timeout=DEADLINE
    )


def route_outside(subnet: str, host: Host) -> None:
    """The lab sends packets for a subnet to a host."""
    subprocess.run(["ip", "route", "add", subnet, "via", host.address], check=True, timeout=DEADLINE)


def put_firewall(host: Host) -> None:
    """What docker and ufw do to a host: whatever passes through it is dropped."""
    chain = "{ type filter hook forward priority 0; policy drop; }"
    subprocess.run(
        ["nsenter", f"--net={host.machine}", "--", "nft", "-f", "-"],
        input=f"add table ip filter\nadd chain ip filter FORWARD {chain}\n".encode(),
        check=True,
        timeout=DEADLINE,
    )


@ON_OVS_TOO
@BRIDGE_IN_SOAK
async def test_pods_reach_the_world_as_their_node(lab: NetLab, closing: ExitStack) -> None:
    """The way out, and nobody from outside comes in by it."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    pod = await one.pod("a", network="dual")
    give_v6(one)
    world = outside(closing)
    assert await calls(pod.place(), world, port=90) == one.address
    assert await calls(pod.place(6), outside(closing, 6), port=90) == HOST_V6
    route_outside("10.7.0.0/16", one)
    assert await traffic.never_reaches(world, pod.place(), port=91)


@ALL_IN_SOAK
async def test_targets_may_see_pods_as_they_are(lab: NetLab, closing: ExitStack) -> None:
    await lab.network("dual", **DUAL)
    one = await lab.host("one", "--nat-exclude", "192.0.2.128/25,2001:db8:ffff::/48")
    pod = await one.pod("a", network="dual")
    world = outside(closing)
    route_outside("10.7.0.0/16", one)
    assert await calls(pod.place(), world, port=92) == str(pod.address())


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
async def test_tenants_with_the_same_addresses_go_out_and_never_meet(lab: NetLab, closing: ExitStack) -> None:
    """H3: the host knows their pods by private addresses, which no pod reaches; all of it survives kill -9 (W30)."""
    one = await lab.host("one")
    pods: dict[str, Pod] = {}
    for tenant in ("blue", "red"):
        await lab.tenant(tenant)
        await lab.network("net", tenant=tenant, subnet="10.9.0.0/24", ipv6Subnet="2001:db8:9::/64")
        ports = mapping(8100 + len(pods))
        pods[tenant] = await one.pod(tenant, tenant=tenant, network="net", portMappings=ports)
    assert pods["blue"].address() == pods["red"].address()
    world, here = outside(closing), {family: own_place(one, closing, family) for family in (4, 6)}
    for again in (False, True):
        if again:
            one.kill()
            await one.start()
        privates = aliases(one)
        assert len({address for _, address in privates}) == 4, "one of each family for each pod"
        for index, (tenant, pod) in enumerate(pods.items()):
            assert await calls(pod.place(), world, port=100 + index) == one.address
            private = {each.version: each for owner, text in privates if owner == tenant and (each := ip_address(text))}
            for family, address in private.items():
                with pod.place(family).listening(110 + index, TCP) as listener:
                    await heard(here[family], address, 110 + index, listener)
            with pod.place().listening(80, TCP) as listener:
                await heard(world, ip_address(one.address), 8100 + index, listener)
            other = pods["red" if tenant == "blue" else "blue"]
            for caller, (family, address) in itertools.product((pod, other), private.items()):
                with pod.place(family).listening(120, TCP) as listener:
                    assert await unheard(caller.place(family), address, 120, listener)


@OVS_MODES_IN_SOAK
async def test_agents_follow_another_private_subnet_and_way_of_forwarding(lab: NetLab, closing: ExitStack) -> None:
    """N8, O9, O10: both change while there is no network, and then hold for whoever comes, without a restart."""
    one = await lab.host("one")
    (await lab.rest.delete("networks", "default:default-net")).accepted()
    here, world = own_place(one, closing), outside(closing)
    for private, mode in (("172.20.0.0/16", "bridge"), ("172.21.0.0/16", "routing")):
        (await lab.rest.put("globals", name="global", fwdMode=mode, pvtSubnet=private)).accepted()
        pods: dict[str, Pod] = {}
        for tenant in ("blue", "red"):
            await lab.tenant(tenant)
            await lab.network("net", tenant=tenant, subnet="10.9.0.0/24")
            pods[tenant] = await one.pod(f"{tenant}-{mode}", tenant=tenant, network="net")
        known = {tenant: ip_address(address) for tenant, address in aliases(one)}
        assert all(address in ip_network(private) for address in known.values())
        for tenant, pod in pods.items():
            with pod.place().listening(80, TCP) as listener:
                await heard(here, known[tenant], 80, listener)
            assert await calls(pod.place(), world, port=90) == one.address
        for tenant, pod in pods.items():
            await pod.remove()
            gone = partial(lab.rest.delete, "networks", f"{tenant}:net")
            await eventually(gone, lambda answer: answer.status == 200)


def aliases(host: Host) -> set[tuple[str, str]]:
    """The private addresses of pods by tenant, as the kernel has them."""
    found: set[tuple[str, str]] = set()
    for tenant, space in inventory.spaces(host).items():
        for each in inventory.ask(space, "nft", "-j", "list", "ruleset")["nftables"]:
            if each.get("map", {}).get("name", "").startswith("aliases"):
                found |= {(tenant, element[0]) for element in each["map"].get("elem", ())}
    return found


async def heard(source: traffic.Place, address: IPAddress, port: int, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with source.open_caller(TCP) as caller:
        async with asyncio.timeout(DEADLINE):
            connecting = asyncio.ensure_future(loop.sock_connect(caller, (str(address), port)))
            connection, _ = await loop.sock_accept(listener)
            connection.close()
            await connecting


async def unheard(source: traffic.Place, address: IPAddress, port: int, listener: socket.socket) -> bool:
    loop = asyncio.get_running_loop()
    with source.open_caller(TCP) as caller, suppress(OSError, TimeoutError):
        async with asyncio.timeout(QUIET_S):
            await loop.sock_connect(caller, (str(address), port))
            return False
    return True


def mapping(port: int, **members: object) -> list[dict[str, object]]:
    return [{"hostPort": port, "containerPort": 80, "protocol": "tcp", **members}]


async def answers(source: traffic.Place, address: str, port: int) -> bool:
    """Whether somebody takes a connection, again and again until it is so."""
    loop = asyncio.get_running_loop()
    with source.open_caller(TCP) as caller, suppress(OSError, TimeoutError):
        async with asyncio.timeout(QUIET_S):
            await loop.sock_connect(caller, (address, port))
            return True
    return False


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
async def test_a_port_of_the_host_leads_to_a_pod_until_del(lab: NetLab, closing: ExitStack) -> None:
    """P-51: from outside and from the host; it survives kill -9, and is gone after DEL."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    pod = await one.pod("a", network="dual", portMappings=mapping(8080))
    world, here = outside(closing), own_place(one, closing)
    with pod.place().listening(80, TCP):
        assert await answers(world, one.address, 8080)
        assert await answers(here, one.address, 8080)
        one.kill()
        await one.start()
        assert await answers(world, one.address, 8080)
        with pytest.raises(CniError, match="tcp/8080 of the host is taken by"):
            await one.pod("b", network="dual", portMappings=mapping(8080))
        await pod.detach()
        assert not await answers(world, one.address, 8080)
    other = await one.pod("b", network="dual", portMappings=mapping(8080))
    with other.place().listening(80, TCP):
        assert await answers(world, one.address, 8080)


@ALL_IN_SOAK
async def test_a_port_of_the_host_is_called_by_another_node(lab: NetLab, closing: ExitStack) -> None:
    """Though that host is known to the tenant as one whose calls come by the overlay: the answer goes as it came."""
    await lab.network("dual", **DUAL)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    pod, _ = await asyncio.gather(
        one.pod("a", network="dual", portMappings=mapping(8080)), two.pod("b", network="dual")
    )
    with pod.place().listening(80, TCP):
        assert await answers(own_place(two, closing), one.address, 8080)
    assert await traffic.reaches(own_place(two, closing), pod.place(), port=82)


@BRIDGE_IN_SOAK
async def test_hosts_are_answered_after_others_had_a_hand_in_the_way_back(lab: NetLab, closing: ExitStack) -> None:
    """The link made anew, what leads home from it taken away; a pod's own calls go out by it all the time."""
    await lab.network("dual", **DUAL)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    pod, _ = await asyncio.gather(one.pod("a", network="dual"), two.pod("b", network="dual"))
    (link,) = [name for name in inventory.devices(one.machine) if name.startswith("wefth-")]
    for place, command in (
        (one.machine, f"ip link del {link}"),
        (one.tenants.path / "default", "nft delete table netdev weft"),
        (one.tenants.path / "default", "nft flush ruleset"),
    ):
        one.kill()
        inventory.run(place, command)
        await one.start()
        for family in (4, 6):
            other = own_place(two, closing, family)
            assert await traffic.reaches(other, pod.place(family), port=82), f"{command}, v{family}"
        assert await calls(pod.place(), own_place(two, closing), port=83) == one.address, command


@ALL_IN_SOAK
async def test_a_port_of_udp_takes_over_those_who_called_before(lab: NetLab, closing: ExitStack) -> None:
    """The host remembers that nobody was there; a caller who keeps its own port would never get through."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    await one.pod("first", network="dual")
    world, loop = outside(closing), asyncio.get_running_loop()
    with world.open_caller(UDP) as caller:
        await loop.sock_sendto(caller, b"early", (one.address, 5353))
        wanted = mapping(5353, containerPort=53, protocol="udp")
        pod = await one.pod("a", network="dual", portMappings=wanted)
        with pod.place().listening(53, UDP) as listener:
            await loop.sock_sendto(caller, b"late", (one.address, 5353))
            async with asyncio.timeout(DEADLINE):
                assert await loop.sock_recv(listener, 64) == b"late"


@ALL_IN_SOAK
async def test_ports_of_the_host_catch_nothing_that_only_passes_by(lab: NetLab, closing: ExitStack) -> None:
    """CVE-2019-9946, CVE-2025-67499: what goes through the host to others is none of its ports' business."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    a, b = await asyncio.gather(one.pod("a", network="dual", portMappings=mapping(8080)), one.pod("b", network="dual"))
    world = outside(closing)
    with a.place().listening(80, TCP):
        assert await answers(world, one.address, 8080)
        assert await calls(b.place(), world, port=8080) == one.address, "the world's port, not the pod's"
        inventory.run(one.machine, "ip addr add 198.51.100.1/32 dev lo")
        route_outside("198.51.100.0/24", one)
        assert await answers(world, "198.51.100.1", 8080), "an address of the host"
        assert not await answers(world, "198.51.100.2", 8080), "only on its way through the host"


@ALL_IN_SOAK
async def test_a_port_of_one_address_is_that_of_no_other(lab: NetLab, closing: ExitStack) -> None:
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    inventory.run(one.machine, "ip addr add 192.0.2.101/24 dev eth0")
    pod = await one.pod("a", network="dual", portMappings=mapping(8080, hostIP="192.0.2.101"))
    world = outside(closing)
    with pod.place().listening(80, TCP):
        assert await answers(world, "192.0.2.101", 8080)
        assert not await answers(world, one.address, 8080)
        assert not await answers(traffic.Place(own_place(one, closing).namespace, LOOPBACK), "127.0.0.1", 8080)


@ALL_IN_SOAK
async def test_a_port_of_loopback_is_the_hosts_own(lab: NetLab, closing: ExitStack) -> None:
    """The host calls it, nobody else does; two pods have one number at two addresses. After it nothing is open."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    inside = await one.pod("a", network="dual", portMappings=mapping(8080, hostIP="127.0.0.1"))
    outer = await one.pod("b", network="dual", portMappings=mapping(8080, hostIP=one.address))
    host = traffic.Place(own_place(one, closing).namespace, LOOPBACK)
    with inside.place().listening(80, TCP) as ear:
        assert await answers(host, "127.0.0.1", 8080)
        connection, (seen, _) = await soon(asyncio.get_running_loop().sock_accept(ear))
        connection.close()
        assert seen == one.address
        assert not await answers(outside(closing), one.address, 8080)
        assert not await answers(inside.place(), "127.0.0.1", 8080)
    with outer.place().listening(80, TCP):
        assert await answers(outside(closing), one.address, 8080)
        assert not await answers(host, "127.0.0.1", 8080)
    one.kill()
    await one.start()
    with inside.place().listening(80, TCP):
        assert await answers(host, "127.0.0.1", 8080)
    assert routing_loopback(one) == {"1"}
    await inside.remove()
    assert not await answers(host, "127.0.0.1", 8080)
    assert routing_loopback(one) == {"0"}


def routing_loopback(host: Host) -> set[str]:
    """Whether packets for loopback, or from it, may use our links, and no other device at all."""
    with Namespace.open(host.machine) as machine:
        settings = machine.run(
            lambda: {
                path.parent.name: path.read_text().strip()
                for path in Path("/proc/sys/net/ipv4/conf").glob("*/route_localnet")
            }
        )
    assert {value for name, value in settings.items() if not name.startswith("wefth-")} == {"0"}
    return {value for name, value in settings.items() if name.startswith("wefth-")}


@ON_ALL
async def test_rates_are_limited_both_ways(lab: NetLab) -> None:
    """P-52: as the kernel, or the switch, says; what comes of a limit is measured in the tests of profiles."""
    one = await lab.host("one")
    rates = {"ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 16_000_000, "egressBurst": 800_000}
    await lab.network("dual", **DUAL)
    pod = await one.pod("a", network="dual", bandwidth=rates)
    space = inventory.spaces(one)["default"]

    def limits() -> dict[str, int]:
        if one.switch is not None:
            metered = switch_inventory.limits(one.switch, pod.result.interfaces[0].name)
            return {"wp": metered["into"].rate, "wi": metered["out"].rate}
        listed = inventory.ask(space, "tc", "-j", "qdisc")
        return {each["dev"][:2]: each["options"]["rate"] * 8 for each in listed if each["kind"] == "tbf"}

    assert limits() == {"wp": 8_000_000, "wi": 16_000_000}
    one.kill()
    await one.start()
    assert limits() == {"wp": 8_000_000, "wi": 16_000_000}
    await pod.remove()
    await until(lambda: not one.tenants.names())


@ON_OVS_TOO
@BRIDGE_IN_SOAK
async def test_nothing_is_left_on_the_host_when_the_last_pod_is_gone(lab: NetLab) -> None:
    """H4, R8: no device, no route, no rule, also where somebody's firewall drops what it does not know."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    put_firewall(one)
    before = host_state(one)
    pod = await one.pod("a", network="dual", portMappings=mapping(8080))
    with ExitStack() as closing:
        assert await calls(pod.place(), outside(closing), port=93) == one.address, "past the firewall"
    assert host_state(one) != before
    await pod.remove()
    await eventually(lambda: asyncio.to_thread(host_state, one), lambda found: found == before)


def host_state(host: Host) -> tuple[set[str], list[str], list[str]]:
    """Devices, routes and rules on a host, as the usual tools tell."""
    routes = [
        str(route["dst"])
        for family in ("-4", "-6")
        for route in inventory.ask(host.machine, "ip", "-j", family, "route")
    ]
    ruleset = inventory.ask(host.machine, "nft", "-j", "list", "ruleset")["nftables"]
    rules = [name for each in ruleset for name in each if name != "metainfo"]
    return inventory.devices(host.machine), sorted(routes), sorted(rules)
