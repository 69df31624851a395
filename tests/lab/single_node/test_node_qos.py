"""Net profiles (scenarios Q): rate limits and DSCP of a group's pods, changed while they run."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.support import inventory, switch_inventory
from tests.support.modes import ALL_IN_SOAK, ON_ALL
from tests.support.switch_inventory import RateLimit

from weft.kernel.netns import Namespace
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab, open_lab
from weft.lab.servers.masters import MasterProcess, client
from weft.lab.traffic import TCP, UDP
from weft.lab.waiting import DEADLINE, eventually, until

SIZE = 1_500_000
TRIES = 8
PORT = 5000
VXLAN_PORT = 4789
_IPV4 = 0x0800


@pytest.fixture
async def host(lab: NetLab) -> Host:
    await lab.network("net", subnet="10.1.0.0/16", gateway="10.1.255.254", ipv6Subnet="2001:db8:1::/64")
    return await lab.host("one")


async def put_profile(lab: NetLab, name: str, *, tenant: str = "default", **members: object) -> None:
    (await lab.rest.put("netprofiles", tenantName=tenant, profileName=name, **members)).accepted()


def host_side_netns(pod: Pod) -> Path:
    """The namespace of the pod's host-side interface: the tenant netns, or that of the switch."""
    if pod.host.switch is not None:
        return pod.host.netns
    tenant = dict(pod.attachment.args).get("io.contiv.tenant", "default")
    return pod.host.tenants.path / tenant


def limit(pod: Pod) -> RateLimit | None:
    """The egress limit of the pod in the kernel or the switch; `None` if unlimited."""
    end = pod.result.interfaces[0].name
    if pod.host.switch is not None:
        return switch_inventory.limits(pod.host.switch, end).get("out")
    for each in inventory.run_json(host_side_netns(pod), "tc", "-j", "filter", "show", "dev", end, "ingress"):
        for action in each.get("options", {}).get("actions", ()):
            queues = inventory.run_json(
                host_side_netns(pod), "tc", "-s", "-j", "qdisc", "show", "dev", action["to_dev"]
            )
            (queue,) = (queue for queue in queues if queue["kind"] == "tbf")
            return RateLimit(queue["options"]["rate"] * 8, queue["bytes"])
    return None


def rate(pod: Pod) -> int:
    """The limit in Contiv's megabits (2**20 bits); 0 if unlimited."""
    found = limit(pod)
    return found.rate >> 20 if found else 0


async def megabits_per_second(source: Pod, target: Pod) -> float:
    """The TCP throughput between two pods, from the first byte sent to the last byte received."""
    loop = asyncio.get_running_loop()
    size = SIZE if source.host.switch is None else 3 * SIZE  # amortizes the larger bursts of Open vSwitch meters
    async with asyncio.timeout(DEADLINE):
        with (
            target.place().listening(PORT, TCP) as listener,
            source.place().open_client(TCP) as sender,
        ):
            await loop.sock_connect(sender, (str(target.address()), PORT))
            receiver, _ = await loop.sock_accept(listener)
            with receiver:
                begun = loop.time()
                sending = asyncio.ensure_future(loop.sock_sendall(sender, bytes(size)))
                left = size
                while left:
                    left -= len(await loop.sock_recv(receiver, 1 << 20))
                await sending
                return size * 8 / (loop.time() - begun) / 1e6


async def assert_throughput(source: Pod, target: Pod, *, megabits: float) -> None:
    """Assert the throughput: never much higher, and not much lower in at least one try, as the machine may be busy."""
    fastest = 0.0
    for _ in range(TRIES):
        fastest = max(fastest, await megabits_per_second(source, target))
        if fastest > 0.7 * megabits:
            break
    assert 0.7 * megabits < fastest < 1.4 * megabits


async def traffic_class(source: Pod, target: Pod, *, family: int) -> int:
    """The received traffic class (DSCP and ECN) of a packet that was sent with zero."""
    level, option = (
        (socket.IPPROTO_IP, socket.IP_RECVTOS) if family == 4 else (socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS)
    )
    with (
        target.place(family).listening(PORT, UDP) as receiver,
        source.place(family).open_client(UDP) as sender,
    ):
        receiver.setsockopt(level, option, 1)
        sender.sendto(b"?", (str(target.address(family)), PORT))
        receiver.settimeout(DEADLINE)
        _, ((_, _, data), *_), _, _ = await asyncio.to_thread(receiver.recvmsg, 64, 64)
    return data[0] if family == 4 else int(struct.unpack("=i", data)[0])


async def outer_traffic_class(source: Pod, target: Pod) -> int:
    """The traffic class of the outer VXLAN packet between two hosts."""
    with (
        Namespace.open(target.host.netns) as machine,
        machine.open_socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_IPV4)) as receiver,
    ):
        receiver.settimeout(DEADLINE)
        await traffic_class(source, target, family=4)
        while True:
            packet = await asyncio.to_thread(receiver.recv, 2048)
            if packet[9] == socket.IPPROTO_UDP and packet[22:24] == VXLAN_PORT.to_bytes(2, "big"):
                return packet[1]


def netctl(lab: NetLab, command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "weft.ctl.netctl.main", "--netmaster", lab.master.url, *command.split()]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=DEADLINE)


@ON_ALL
async def test_a_profile_is_attached_changed_and_detached_with_running_pods(lab: NetLab, host: Host) -> None:
    """Q1 to Q6, with netctl."""

    def done(command: str) -> None:
        result = netctl(lab, command)
        assert result.returncode == 0, result.stderr

    done("group create net web")
    a, b = await host.pod("a", group="web"), await host.pod("b", network="net")
    assert limit(a) is None
    done("netprofile create slow --bandwidth 6Mbps")
    done("group create net web --networkprofile slow")
    await until(lambda: rate(a) == 6)
    assert limit(b) is None
    await assert_throughput(a, b, megabits=6.3)
    done("netprofile create slow --bandwidth 16Mbps")
    await until(lambda: rate(a) == 16)
    await assert_throughput(a, b, megabits=16.8)
    result = netctl(lab, "netprofile rm slow")
    assert result.returncode != 0
    assert "default:web" in result.stderr
    done("group create net web --no-networkprofile")
    await until(lambda: limit(a) is None)
    assert await megabits_per_second(a, b) > 17
    done("netprofile rm slow")
    done("netprofile create other --bandwidth 9Mbps --burst 100")
    done("group create net web --networkprofile other")
    await until(lambda: rate(a) == 9)
    done("netprofile create other --no-bandwidth")
    await until(lambda: limit(a) is None)


@ON_ALL
async def test_a_limit_applies_when_add_returns_and_is_removed_by_del(lab: NetLab, host: Host) -> None:
    await put_profile(lab, "slow", bandwidth="6Mbps", DSCP=46)
    await lab.group("web", network="net", netProfile="slow")
    keeper = await host.pod("keeper", network="net")
    before = inventory.devices(host_side_netns(keeper))
    pods = await asyncio.gather(*(host.pod(f"p{number}", group="web") for number in range(8)))
    assert {rate(pod) for pod in pods} == {6}
    assert await traffic_class(pods[0], keeper, family=4) == 46 << 2
    await asyncio.gather(*(pod.remove() for pod in pods))
    await until(lambda: inventory.devices(host_side_netns(keeper)) == before)
    if host.switch is None:
        assert "wp" not in str(
            inventory.run_json(host_side_netns(keeper), "nft", "-j", "list", "map", "inet", "weft", "port_dscp")
        )
    else:
        assert switch_inventory.meters(host.switch) == set()
        assert not any("meter" in flow or "ip_dscp" in flow for flow in host.switch.dump_flows(switch_inventory.BRIDGE))


@ALL_IN_SOAK
async def test_a_change_touches_only_pods_of_its_group(lab: NetLab, host: Host) -> None:
    """The counters of the other group's limit are not reset, not even by a restart of the agent (R5)."""
    for name, bandwidth in (("gold", "30Mbps"), ("tin", "7Mbps")):
        await put_profile(lab, name, bandwidth=bandwidth)
        await lab.group(name, network="net", netProfile=name)
    a, b = await host.pod("a", group="gold"), await host.pod("b", group="tin")
    assert await a.eventually_reaches(b)
    assert await b.eventually_reaches(a)
    counted = {pod: limit(pod) for pod in (a, b)}
    assert all(each is not None and each.passed > 0 for each in counted.values())
    await put_profile(lab, "tin", bandwidth="8Mbps")
    await until(lambda: rate(b) == 8)
    host.kill()
    await host.start()
    for pod, megabits in ((a, 30), (b, 8)):
        now, before = limit(pod), counted[pod]
        assert now is not None
        assert before is not None
        keeps_counters = pod is a or host.switch is None  # a modified OVS meter resets its counters
        assert (now.rate >> 20, now.passed >= before.passed or not keeps_counters) == (megabits, True)


@ALL_IN_SOAK
async def test_each_tenant_has_its_own_limits(lab: NetLab, host: Host) -> None:
    """Q7: the same names and subnets with different limits."""
    wanted = {"red": 6, "blue": 16}
    pods = {}
    for tenant, megabits in wanted.items():
        await lab.tenant(tenant)
        await lab.network("net", tenant=tenant, subnet="10.1.0.0/16", gateway="10.1.255.254")
        await put_profile(lab, "limited", tenant=tenant, bandwidth=f"{megabits}M")
        await lab.group("web", tenant=tenant, network="net", netProfile="limited")
        pods[tenant] = await host.pod(tenant, tenant=tenant, group="web")
    assert {tenant: rate(pod) for tenant, pod in pods.items()} == wanted
    await put_profile(lab, "limited", tenant="red", bandwidth="7M")
    await until(lambda: rate(pods["red"]) == 7)
    assert rate(pods["blue"]) == 16


@ALL_IN_SOAK
async def test_a_profile_changed_while_the_agent_is_down_applies_after_its_start(lab: NetLab, host: Host) -> None:
    """Q8. Drift in the kernel is repaired too."""
    await put_profile(lab, "slow", bandwidth="6Mbps", DSCP=10)
    for name in ("web", "db"):
        await lab.group(name, network="net", netProfile="slow")
    a, b, c = await host.pod("a", group="web"), await host.pod("b", group="db"), await host.pod("c", network="net")
    host.kill()
    await put_profile(lab, "slow", bandwidth="16Mbps", DSCP=12)
    await lab.group("db", network="net", netProfile="")
    if host.switch is None:
        inventory.run(host_side_netns(a), f"tc qdisc del dev {a.result.interfaces[0].name} ingress")
    else:
        host.switch.flows("del-meters", switch_inventory.BRIDGE)
    assert limit(a) is None
    await host.start()
    assert (rate(a), limit(b)) == (16, None)
    assert await traffic_class(a, c, family=4) == 12 << 2
    assert await traffic_class(b, c, family=4) == 0


@ALL_IN_SOAK
async def test_a_restored_interface_has_its_limit(lab: NetLab, host: Host) -> None:
    await put_profile(lab, "slow", bandwidth="6Mbps", DSCP=10)
    await lab.group("web", network="net", netProfile="slow")
    a, b = await host.pod("a", group="web"), await host.pod("b", network="net")
    host.kill()
    inventory.run(host_side_netns(a), f"ip link del {a.result.interfaces[0].name}")
    await host.start()
    assert rate(a) == 6
    assert await traffic_class(a, b, family=4) == 10 << 2


async def test_a_profile_is_changed_after_a_leader_failover() -> None:
    """Q9."""
    async with open_lab(store="etcd") as lab, AsyncExitStack() as stack:
        assert lab.etcd is not None
        await put_profile(lab, "slow", bandwidth="6Mbps")
        await lab.group("web", network="default-net", netProfile="slow")
        host = await lab.host("one")
        a = await host.pod("a", group="web")
        flags = ("--etcd-endpoints", ",".join(lab.etcd.endpoints), "--leader-ttl", "2")
        second = await stack.enter_async_context(MasterProcess(lab.directory / "second", *flags))
        rest = await stack.enter_async_context(client(second.url))
        lab.master.kill()

        async def is_accepted() -> int:
            profile = {"tenantName": "default", "profileName": "slow", "bandwidth": "16Mbps"}
            return (await rest.put("netprofiles", **profile)).status

        await eventually(is_accepted, lambda status: status == 200)
        await until(lambda: rate(a) == 16)


@ALL_IN_SOAK
async def test_the_senders_limit_applies_across_hosts(lab: NetLab, host: Host) -> None:
    """Q10, between two hosts."""
    for name, bandwidth in (("fast", "16Mbps"), ("slow", "6Mbps")):
        await put_profile(lab, name, bandwidth=bandwidth)
        await lab.group(name, network="net", netProfile=name)
    other = await lab.host("two")
    fast, slow = await host.pod("fast", group="fast"), await other.pod("slow", group="slow")
    await assert_throughput(fast, slow, megabits=16.8)
    await assert_throughput(slow, fast, megabits=6.3)


@ON_ALL
async def test_the_bandwidth_capability_limits_ingress(lab: NetLab, host: Host) -> None:
    """P-52, also while the agent is down; other pods are not limited."""
    bandwidth = {"ingressRate": 8_000_000, "ingressBurst": 800_000}
    a, b = await host.pod("a", network="net", bandwidth=bandwidth), await host.pod("b", network="net")
    await assert_throughput(b, a, megabits=8)
    host.kill()
    await assert_throughput(b, a, megabits=8)
    assert await megabits_per_second(a, b) > 17


@ON_ALL
async def test_packets_have_the_dscp_of_their_group(lab: NetLab, host: Host) -> None:
    """Q11: in the inner header and, between hosts, in the outer header."""
    other = await lab.host("two")
    await lab.group("web", network="net")
    a, b = await host.pod("a", group="web"), await other.pod("b", network="net")

    async def assert_dscp(dscp: int) -> None:
        for family in (4, 6):
            await eventually(lambda: traffic_class(a, b, family=family), lambda found: found == dscp << 2)  # noqa: B023
        if lab.netmode == "vxlan":  # VLAN frames have no outer IP header
            assert await outer_traffic_class(a, b) == dscp << 2

    await assert_dscp(0)
    await put_profile(lab, "gold", DSCP=46)
    await lab.group("web", network="net", netProfile="gold")
    await assert_dscp(46)
    for dscp in (10, 0, 46):
        await put_profile(lab, "gold", DSCP=dscp)
        await assert_dscp(dscp)
    await put_profile(lab, "tin", DSCP=8, bandwidth="20Mbps")
    await lab.group("web", network="net", netProfile="tin")
    await assert_dscp(8)
    assert await traffic_class(b, a, family=4) == 0
    await lab.group("web", network="net", netProfile="")
    await assert_dscp(0)
