"""Host and external connectivity of pods (contiv 6.5, 10.4): hosts have strict reverse path filters."""

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
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import Namespace
from weft.kernel.uapi.netlink import NETLINK_NETFILTER
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


def host_address(host: Host, closing: ExitStack, family: int = 4) -> traffic.NetnsAddress:
    """The host itself, with the address that it uses towards pods."""
    namespace = closing.enter_context(Namespace.open(host.netns))
    v4 = ip_address(host.address)
    return traffic.NetnsAddress(namespace, v4 if family == 4 else ip_address(f"fd77:6566:7400::{host.address}"))


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
@pytest.mark.parametrize("gateways", [{}, {"gateway": "10.7.0.1", "ipv6Gateway": "2001:db8:7::1"}])
async def test_hosts_and_pods_reach_each_other(lab: NetLab, closing: ExitStack, gateways: dict[str, str]) -> None:
    """H2, W35: hosts reach pods of their own and of other hosts, pods reach their host; with a gateway or without."""
    await lab.network("dual", **DUAL, **gateways)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    a, b = await asyncio.gather(one.pod("a", network="dual"), two.pod("b", network="dual"))
    for family in (4, 6):
        here = host_address(one, closing, family)
        assert await traffic.eventually_reaches(here, a.place(family), port=80), f"host to its pod, v{family}"
        assert await traffic.eventually_reaches(a.place(family), here, port=81), f"pod to its host, v{family}"
        for transport in (TCP, UDP):
            assert await traffic.eventually_reaches(here, b.place(family), port=82, transport=transport), (
                f"to another's, v{family}"
            )
    assert await a.eventually_reaches(b)


@OVS_MODES_IN_SOAK
async def test_vxlan_packets_are_not_tracked_on_the_host(lab: NetLab, closing: ExitStack) -> None:
    """Tunnel packets would fill the host's conntrack table."""
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    a, b = await asyncio.gather(one.pod("a"), two.pod("b"))
    assert await a.eventually_reaches(b)
    assert await traffic.eventually_reaches(host_address(one, closing), host_address(two, closing), port=83)
    for host in (one, two):
        with Namespace.open(host.netns) as machine, NetlinkSocket(NETLINK_NETFILTER, namespace=machine) as netfilter:
            ports = {each.original.destination_port for each in read_connections(netfilter, family=4)}
        assert 83 in ports, "other connections are tracked"
        assert VXLAN_PORT not in ports


@ON_OVS_AND_TAGS
@BRIDGE_IN_SOAK
async def test_a_pod_with_denied_ingress_accepts_its_own_host_only(lab: NetLab, closing: ExitStack) -> None:
    """The pod's own host reaches it for kubelet's probes; no other host does."""
    await lab.network("dual", **DUAL)
    (await lab.rest.put("policys", tenantName="default", policyName="closed")).accepted()
    rule = {"policyName": "closed", "ruleId": "1", "priority": 1, "direction": "in", "action": "deny"}
    (await lab.rest.put("rules", tenantName="default", **rule)).accepted()
    await lab.group("closed", network="dual", policies=["closed"])
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    pod, _ = await asyncio.gather(one.pod("a", network="dual", group="closed"), two.pod("b", network="dual"))
    for family in (4, 6):
        assert await traffic.eventually_reaches(host_address(one, closing, family), pod.place(family), port=80)
        assert await traffic.never_reaches(host_address(two, closing, family), pod.place(family), port=80)


@ALL_IN_SOAK
async def test_drift_on_the_host_is_repaired(lab: NetLab, closing: ExitStack) -> None:
    """Links, routes and rules are repaired at start-up, and a flushed ruleset at once."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    pod = await one.pod("a", network="dual", portMappings=mapping(8080))
    before = host_state(one)
    (link,) = [name for name in inventory.devices(one.netns) if name.startswith("wefth-")]
    for command in (f"ip link del {link}", "nft delete table inet weft_host", "ip route del 10.7.0.0/16"):
        one.kill()
        inventory.run(one.netns, command)
        assert host_state(one) != before
        await one.start()
        assert host_state(one) == before
    inventory.run(one.netns, "nft flush ruleset")
    await eventually(lambda: asyncio.to_thread(host_state, one), lambda found: found == before)
    with pod.place().listening(80, TCP):
        assert await can_connect(external_host(closing), one.address, 8080)


async def observed_source(source: traffic.NetnsAddress, target: traffic.NetnsAddress, *, port: int) -> str:
    """Connect to the target and return the source address that it sees."""
    loop = asyncio.get_running_loop()
    with target.listening(port, TCP) as listener, source.open_client(TCP) as client:
        async with asyncio.timeout(DEADLINE):
            connecting = asyncio.ensure_future(loop.sock_connect(client, (str(target.address), port)))
            connection, (host, *_) = await loop.sock_accept(listener)
            with connection:
                await connecting
                await loop.sock_sendall(connection, b"?")
                assert await loop.sock_recv(client, 1) == b"?"
    return str(host)


def external_host(closing: ExitStack, family: int = 4) -> traffic.NetnsAddress:
    """The lab's own address on the underlay, which is no node."""
    address = ip_address("192.0.2.254" if family == 4 else "2001:db8:ffff::254")
    return traffic.NetnsAddress(closing.enter_context(Namespace.current()), address)


def add_ipv6_underlay(host: Host) -> None:
    """Add IPv6 underlay addresses to a host and to the lab."""
    inventory.run(host.netns, f"ip addr add {HOST_V6}/64 dev eth0 nodad")
    subprocess.run(
        ["ip", "addr", "add", "2001:db8:ffff::254/64", "dev", "underlay", "nodad"], check=True, timeout=DEADLINE
    )


def route_from_external_host(subnet: str, host: Host) -> None:
    """Route a subnet from the lab to a host."""
    subprocess.run(["ip", "route", "add", subnet, "via", host.address], check=True, timeout=DEADLINE)


def add_drop_firewall(host: Host) -> None:
    """Add a FORWARD chain with policy drop, as docker and ufw do."""
    chain = "{ type filter hook forward priority 0; policy drop; }"
    subprocess.run(
        ["nsenter", f"--net={host.netns}", "--", "nft", "-f", "-"],
        input=f"add table ip filter\nadd chain ip filter FORWARD {chain}\n".encode(),
        check=True,
        timeout=DEADLINE,
    )


@ON_OVS_TOO
@BRIDGE_IN_SOAK
async def test_egress_traffic_is_masqueraded_as_the_node(lab: NetLab, closing: ExitStack) -> None:
    """Egress SNAT works for both families and opens no path from outside."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    pod = await one.pod("a", network="dual")
    add_ipv6_underlay(one)
    external = external_host(closing)
    assert await observed_source(pod.place(), external, port=90) == one.address
    assert await observed_source(pod.place(6), external_host(closing, 6), port=90) == HOST_V6
    route_from_external_host("10.7.0.0/16", one)
    assert await traffic.never_reaches(external, pod.place(), port=91)


@ALL_IN_SOAK
async def test_nat_exclude_preserves_the_pod_address(lab: NetLab, closing: ExitStack) -> None:
    await lab.network("dual", **DUAL)
    one = await lab.host("one", "--nat-exclude", "192.0.2.128/25,2001:db8:ffff::/48")
    pod = await one.pod("a", network="dual")
    external = external_host(closing)
    route_from_external_host("10.7.0.0/16", one)
    assert await observed_source(pod.place(), external, port=92) == str(pod.address())


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
async def test_tenants_with_overlapping_subnets_have_egress_and_are_isolated(lab: NetLab, closing: ExitStack) -> None:
    """H3: the host reaches their pods by alias addresses, which no pod reaches; it survives kill -9 (W30)."""
    one = await lab.host("one")
    pods: dict[str, Pod] = {}
    for tenant in ("blue", "red"):
        await lab.tenant(tenant)
        await lab.network("net", tenant=tenant, subnet="10.9.0.0/24", ipv6Subnet="2001:db8:9::/64")
        ports = mapping(8100 + len(pods))
        pods[tenant] = await one.pod(tenant, tenant=tenant, network="net", portMappings=ports)
    assert pods["blue"].address() == pods["red"].address()
    external, here = external_host(closing), {family: host_address(one, closing, family) for family in (4, 6)}
    for again in (False, True):
        if again:
            one.kill()
            await one.start()
        pod_aliases = aliases(one)
        assert len({address for _, address in pod_aliases}) == 4, "one per family and pod"
        for index, (tenant, pod) in enumerate(pods.items()):
            assert await observed_source(pod.place(), external, port=100 + index) == one.address
            alias_by_family = {
                each.version: each for owner, text in pod_aliases if owner == tenant and (each := ip_address(text))
            }
            for family, address in alias_by_family.items():
                with pod.place(family).listening(110 + index, TCP) as listener:
                    await assert_connects(here[family], address, 110 + index, listener)
            with pod.place().listening(80, TCP) as listener:
                await assert_connects(external, ip_address(one.address), 8100 + index, listener)
            other = pods["red" if tenant == "blue" else "blue"]
            for client, (family, address) in itertools.product((pod, other), alias_by_family.items()):
                with pod.place(family).listening(120, TCP) as listener:
                    assert await cannot_connect(client.place(family), address, 120, listener)


@OVS_MODES_IN_SOAK
async def test_agents_apply_a_changed_private_subnet_and_forwarding_mode(lab: NetLab, closing: ExitStack) -> None:
    """N8, O9, O10: both change while no network exists, and apply to new pods without a restart."""
    one = await lab.host("one")
    (await lab.rest.delete("networks", "default:default-net")).accepted()
    here, external = host_address(one, closing), external_host(closing)
    for private_subnet, mode in (("172.20.0.0/16", "bridge"), ("172.21.0.0/16", "routing")):
        (await lab.rest.put("globals", name="global", fwdMode=mode, pvtSubnet=private_subnet)).accepted()
        pods: dict[str, Pod] = {}
        for tenant in ("blue", "red"):
            await lab.tenant(tenant)
            await lab.network("net", tenant=tenant, subnet="10.9.0.0/24")
            pods[tenant] = await one.pod(f"{tenant}-{mode}", tenant=tenant, network="net")
        known = {tenant: ip_address(address) for tenant, address in aliases(one)}
        assert all(address in ip_network(private_subnet) for address in known.values())
        for tenant, pod in pods.items():
            with pod.place().listening(80, TCP) as listener:
                await assert_connects(here, known[tenant], 80, listener)
            assert await observed_source(pod.place(), external, port=90) == one.address
        for tenant, pod in pods.items():
            await pod.remove()
            delete_network = partial(lab.rest.delete, "networks", f"{tenant}:net")
            await eventually(delete_network, lambda answer: answer.status == 200)


def aliases(host: Host) -> set[tuple[str, str]]:
    """The alias addresses of pods by tenant, read from the kernel."""
    found: set[tuple[str, str]] = set()
    for tenant, netns in inventory.tenant_netns(host).items():
        for each in inventory.run_json(netns, "nft", "-j", "list", "ruleset")["nftables"]:
            if each.get("map", {}).get("name", "").startswith("dnat_alias"):
                found |= {(tenant, element[0]) for element in each["map"].get("elem", ())}
    return found


async def assert_connects(source: traffic.NetnsAddress, address: IPAddress, port: int, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with source.open_client(TCP) as client:
        async with asyncio.timeout(DEADLINE):
            connecting = asyncio.ensure_future(loop.sock_connect(client, (str(address), port)))
            connection, _ = await loop.sock_accept(listener)
            connection.close()
            await connecting


async def cannot_connect(source: traffic.NetnsAddress, address: IPAddress, port: int, listener: socket.socket) -> bool:
    loop = asyncio.get_running_loop()
    with source.open_client(TCP) as client, suppress(OSError, TimeoutError):
        async with asyncio.timeout(QUIET_S):
            await loop.sock_connect(client, (str(address), port))
            return False
    return True


def mapping(port: int, **members: object) -> list[dict[str, object]]:
    return [{"hostPort": port, "containerPort": 80, "protocol": "tcp", **members}]


async def can_connect(source: traffic.NetnsAddress, address: str, port: int) -> bool:
    """Whether a connection is accepted within `QUIET_S`."""
    loop = asyncio.get_running_loop()
    with source.open_client(TCP) as client, suppress(OSError, TimeoutError):
        async with asyncio.timeout(QUIET_S):
            await loop.sock_connect(client, (address, port))
            return True
    return False


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
async def test_a_host_port_forwards_to_its_pod_until_del(lab: NetLab, closing: ExitStack) -> None:
    """P-51: from outside and from the host; it survives kill -9, and is gone after DEL."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    pod = await one.pod("a", network="dual", portMappings=mapping(8080))
    external, here = external_host(closing), host_address(one, closing)
    with pod.place().listening(80, TCP):
        assert await can_connect(external, one.address, 8080)
        assert await can_connect(here, one.address, 8080)
        one.kill()
        await one.start()
        assert await can_connect(external, one.address, 8080)
        with pytest.raises(CniError, match="tcp/8080 of the host is taken by"):
            await one.pod("b", network="dual", portMappings=mapping(8080))
        await pod.detach()
        assert not await can_connect(external, one.address, 8080)
    other = await one.pod("b", network="dual", portMappings=mapping(8080))
    with other.place().listening(80, TCP):
        assert await can_connect(external, one.address, 8080)


@ALL_IN_SOAK
async def test_a_host_port_is_reachable_from_another_node(lab: NetLab, closing: ExitStack) -> None:
    """The tenant has an overlay route to that node, but the reply takes the path of the request."""
    await lab.network("dual", **DUAL)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    pod, _ = await asyncio.gather(
        one.pod("a", network="dual", portMappings=mapping(8080)), two.pod("b", network="dual")
    )
    with pod.place().listening(80, TCP):
        assert await can_connect(host_address(two, closing), one.address, 8080)
    assert await traffic.eventually_reaches(host_address(two, closing), pod.place(), port=82)


@BRIDGE_IN_SOAK
async def test_hosts_get_replies_after_the_return_path_drifted(lab: NetLab, closing: ExitStack) -> None:
    """The link is recreated, or its return path rules are deleted; the pod's own egress works all the time."""
    await lab.network("dual", **DUAL)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    pod, _ = await asyncio.gather(one.pod("a", network="dual"), two.pod("b", network="dual"))
    (link,) = [name for name in inventory.devices(one.netns) if name.startswith("wefth-")]
    for place, command in (
        (one.netns, f"ip link del {link}"),
        (one.tenants.path / "default", "nft delete table netdev weft"),
        (one.tenants.path / "default", "nft flush ruleset"),
    ):
        one.kill()
        inventory.run(place, command)
        await one.start()
        for family in (4, 6):
            other = host_address(two, closing, family)
            assert await traffic.eventually_reaches(other, pod.place(family), port=82), f"{command}, v{family}"
        assert await observed_source(pod.place(), host_address(two, closing), port=83) == one.address, command


@ALL_IN_SOAK
async def test_a_udp_host_port_takes_over_existing_flows(lab: NetLab, closing: ExitStack) -> None:
    """Conntrack has an entry from before the DNAT rule; a client with a fixed source port would keep it forever."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    await one.pod("first", network="dual")
    external, loop = external_host(closing), asyncio.get_running_loop()
    with external.open_client(UDP) as client:
        await loop.sock_sendto(client, b"early", (one.address, 5353))
        wanted = mapping(5353, containerPort=53, protocol="udp")
        pod = await one.pod("a", network="dual", portMappings=wanted)
        with pod.place().listening(53, UDP) as listener:
            await loop.sock_sendto(client, b"late", (one.address, 5353))
            async with asyncio.timeout(DEADLINE):
                assert await loop.sock_recv(listener, 64) == b"late"


@ALL_IN_SOAK
async def test_host_ports_do_not_match_forwarded_traffic(lab: NetLab, closing: ExitStack) -> None:
    """CVE-2019-9946, CVE-2025-67499: DNAT applies to the host's own addresses only."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    a, b = await asyncio.gather(one.pod("a", network="dual", portMappings=mapping(8080)), one.pod("b", network="dual"))
    external = external_host(closing)
    with a.place().listening(80, TCP):
        assert await can_connect(external, one.address, 8080)
        assert await observed_source(b.place(), external, port=8080) == one.address, (
            "the external host's port, not the pod's"
        )
        inventory.run(one.netns, "ip addr add 198.51.100.1/32 dev lo")
        route_from_external_host("198.51.100.0/24", one)
        assert await can_connect(external, "198.51.100.1", 8080), "an address of the host"
        assert not await can_connect(external, "198.51.100.2", 8080), "only forwarded by the host"


@ALL_IN_SOAK
async def test_a_host_port_is_bound_to_its_host_ip(lab: NetLab, closing: ExitStack) -> None:
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    inventory.run(one.netns, "ip addr add 192.0.2.101/24 dev eth0")
    pod = await one.pod("a", network="dual", portMappings=mapping(8080, hostIP="192.0.2.101"))
    external = external_host(closing)
    with pod.place().listening(80, TCP):
        assert await can_connect(external, "192.0.2.101", 8080)
        assert not await can_connect(external, one.address, 8080)
        assert not await can_connect(
            traffic.NetnsAddress(host_address(one, closing).namespace, LOOPBACK), "127.0.0.1", 8080
        )


@ALL_IN_SOAK
async def test_a_loopback_host_port_is_reachable_from_the_host_only(lab: NetLab, closing: ExitStack) -> None:
    """Two pods may use one port on two host IPs. `route_localnet` is off again afterwards."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    inside = await one.pod("a", network="dual", portMappings=mapping(8080, hostIP="127.0.0.1"))
    outer = await one.pod("b", network="dual", portMappings=mapping(8080, hostIP=one.address))
    host = traffic.NetnsAddress(host_address(one, closing).namespace, LOOPBACK)
    with inside.place().listening(80, TCP) as listener:
        assert await can_connect(host, "127.0.0.1", 8080)
        connection, (seen, _) = await soon(asyncio.get_running_loop().sock_accept(listener))
        connection.close()
        assert seen == one.address
        assert not await can_connect(external_host(closing), one.address, 8080)
        assert not await can_connect(inside.place(), "127.0.0.1", 8080)
    with outer.place().listening(80, TCP):
        assert await can_connect(external_host(closing), one.address, 8080)
        assert not await can_connect(host, "127.0.0.1", 8080)
    one.kill()
    await one.start()
    with inside.place().listening(80, TCP):
        assert await can_connect(host, "127.0.0.1", 8080)
    assert route_localnet_devices(one) == {"1"}
    await inside.remove()
    assert not await can_connect(host, "127.0.0.1", 8080)
    assert route_localnet_devices(one) == {"0"}


def route_localnet_devices(host: Host) -> set[str]:
    """The devices with `route_localnet`, which may only be our own links."""
    with Namespace.open(host.netns) as machine:
        settings = machine.run(
            lambda: {
                path.parent.name: path.read_text().strip()
                for path in Path("/proc/sys/net/ipv4/conf").glob("*/route_localnet")
            }
        )
    assert {value for name, value in settings.items() if not name.startswith("wefth-")} == {"0"}
    return {value for name, value in settings.items() if name.startswith("wefth-")}


@ON_ALL
async def test_rates_are_limited_in_both_directions(lab: NetLab) -> None:
    """P-52: read from the kernel or the switch; `test_node_qos.py` measures the throughput."""
    one = await lab.host("one")
    rates = {"ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 16_000_000, "egressBurst": 800_000}
    await lab.network("dual", **DUAL)
    pod = await one.pod("a", network="dual", bandwidth=rates)
    netns = inventory.tenant_netns(one)["default"]

    def limits() -> dict[str, int]:
        if one.switch is not None:
            metered = switch_inventory.limits(one.switch, pod.result.interfaces[0].name)
            return {"wp": metered["into"].rate, "wi": metered["out"].rate}
        listed = inventory.run_json(netns, "tc", "-j", "qdisc")
        return {each["dev"][:2]: each["options"]["rate"] * 8 for each in listed if each["kind"] == "tbf"}

    assert limits() == {"wp": 8_000_000, "wi": 16_000_000}
    one.kill()
    await one.start()
    assert limits() == {"wp": 8_000_000, "wi": 16_000_000}
    await pod.remove()
    await until(lambda: not one.tenants.names())


@ON_OVS_TOO
@BRIDGE_IN_SOAK
async def test_nothing_is_left_on_the_host_after_the_last_del(lab: NetLab) -> None:
    """H4, R8: no device, route or rule, also with a firewall that drops by default."""
    await lab.network("dual", **DUAL)
    one = await lab.host("one")
    add_drop_firewall(one)
    before = host_state(one)
    pod = await one.pod("a", network="dual", portMappings=mapping(8080))
    with ExitStack() as closing:
        assert await observed_source(pod.place(), external_host(closing), port=93) == one.address, "past the firewall"
    assert host_state(one) != before
    await pod.remove()
    await eventually(lambda: asyncio.to_thread(host_state, one), lambda found: found == before)


def host_state(host: Host) -> tuple[set[str], list[str], list[str]]:
    """Devices, routes and rules on a host, read with `ip` and `nft`."""
    routes = [
        str(route["dst"])
        for family in ("-4", "-6")
        for route in inventory.run_json(host.netns, "ip", "-j", family, "route")
    ]
    ruleset = inventory.run_json(host.netns, "nft", "-j", "list", "ruleset")["nftables"]
    rules = [name for each in ruleset for name in each if name != "metainfo"]
    return inventory.devices(host.netns), sorted(routes), sorted(rules)
