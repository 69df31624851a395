"""VLAN networks over uplinks (contiv 7.1, 7.6, 7.7): between hosts, with external hosts, and beside VXLAN."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import pytest
from tests.support import inventory
from tests.support.connectivity import SILENCE_S
from tests.support.ethernet import (
    ARP,
    BROADCAST,
    IPV4,
    REQUEST,
    arp,
    datagram,
    frame,
    is_arp,
    is_from,
    open_packet_socket,
    received_vlan_tag,
    receives,
    tagged,
)
from tests.support.external_hosts import host_netns_address
from tests.support.modes import BOTH_MODES
from tests.support.switch_inventory import VLAN_BRIDGE, uplinks

from weft.adapters.netns.devices import overlay_mac
from weft.domain.addresses import Address, parse_address
from weft.kernel.netns import Namespace
from weft.lab import traffic
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.waiting import DEADLINE, eventually, until

TAG = 100
HERE = Path("/proc/self/ns/net")
EXTERNAL_HOST = ("52:54:00:00:00:77", parse_address("10.1.0.77", field="external"))


@pytest.fixture
def netmode() -> str:
    return "vlan"


async def two_hosts(lab: NetLab) -> tuple[Host, Host]:
    await lab.network("net", subnet="10.1.0.0/16", gateway="10.1.255.254", ipv6Subnet="2001:db8:1::/64", pktTag=TAG)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    return one, two


@pytest.fixture
def external(isolated: None) -> Iterator[socket.socket]:
    """A port on the VLAN trunk for a host outside the cluster."""
    with ExitStack() as closing:
        here = closing.enter_context(Namespace.current())
        inventory.run(HERE, "ip link add out0 type veth peer name out1")
        inventory.run(HERE, "ip link set out0 up")
        inventory.run(HERE, "ip link set out1 up")
        yield closing.enter_context(open_packet_socket(here, interface="out0"))


def plug_external() -> None:
    inventory.run(HERE, "ip link set out1 master trunk")


def address_of(pod: Pod) -> Address:
    return parse_address(str(pod.address()), field="pod")


def mac_of(pod: Pod) -> str:
    (link,) = inventory.run_json(pod.netns, "ip", "-j", "link", "show", "eth0")
    return str(link["address"])


@BOTH_MODES
async def test_frames_between_hosts_have_the_networks_tag(lab: NetLab) -> None:
    """They leave by the uplink, without a tunnel."""
    one, two = await two_hosts(lab)
    a, b = await one.pod("a", network="net"), await two.pod("b", network="net")
    with Namespace.current() as here, open_packet_socket(here, interface=f"{two.underlay_veth}-eth1") as capture:
        for family in (4, 6):
            assert await a.eventually_reaches(b, family=family)
            assert await b.eventually_reaches(a, family=family)
        assert (
            await asyncio.to_thread(
                received_vlan_tag, capture, lambda data: data[12:14] != b"\x08\x06", within=DEADLINE
            )
            == TAG
        )
    assert one.switch is not None
    assert one.switch.configure("list-ports", VLAN_BRIDGE).split() == ["uplinkPort", "weft-vlan-up"]


@BOTH_MODES
async def test_a_group_may_have_a_tag_of_its_own(lab: NetLab) -> None:
    """contiv 5.1: it overrides the network's. Groups with different tags are different segments."""
    one, two = await two_hosts(lab)
    await lab.group("own", network="net", pktTag=TAG + 1)
    a, b = [await host.pod(f"own-{host.name}", network="net", group="own") for host in (one, two)]
    with Namespace.current() as here, open_packet_socket(here, interface=f"{two.underlay_veth}-eth1") as capture:

        async def captured_tag() -> int | None:
            assert await a.eventually_reaches(b)
            assert await a.eventually_reaches(b, family=6)
            return await asyncio.to_thread(
                received_vlan_tag, capture, lambda data: data[12:14] != b"\x08\x06", within=DEADLINE
            )

        # In routing mode the route of the node's block is known before that of the endpoint, which has the group's tag.
        await eventually(captured_tag, lambda tag: tag == TAG + 1)
    c, d = [await host.pod(f"usual-{host.name}", network="net") for host in (one, two)]
    one.kill()
    await one.start()
    for source, target in ((a, b), (b, a), (c, d), (d, c)):
        assert await source.eventually_reaches(target), f"{source.name} to {target.name}"
    for other in (c, d):
        assert await (a.never_reaches(other) if lab.fwdmode == "bridge" else a.eventually_reaches(other))
    for pod in (a, b):
        await pod.remove()
    await eventually(lambda: lab.rest.delete("endpointGroups", "default:own"), lambda answer: answer.status == 200)
    await lab.network("reuse", subnet="10.2.0.0/16", pktTag=TAG + 1)
    e, f = [await host.pod(f"reuse-{host.name}", network="reuse") for host in (one, two)]
    assert await e.eventually_reaches(f)


@BOTH_MODES
async def test_tenants_may_have_the_same_address_on_different_hosts(lab: NetLab) -> None:
    """N6, W42: the same MAC is on both hosts with different tags; learning one must not hide the other."""
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    pairs: dict[str, tuple[Pod, Pod]] = {}
    for tenant, hosts in (("blue", (one, two)), ("red", (two, one))):
        await lab.tenant(tenant)
        await lab.network("net", tenant=tenant, subnet="10.9.0.0/24", ipv6Subnet="2001:db8:9::/64")
        first, second = [await host.pod(f"{tenant}-{host.name}", tenant=tenant, network="net") for host in hosts]
        pairs[tenant] = (first, second)
    assert pairs["blue"][0].address() == pairs["red"][0].address()
    for family, (own, others) in itertools.product((4, 6), itertools.permutations(pairs.values())):
        assert await others[0].eventually_reaches(others[1], family=family)
        assert await own[1].eventually_reaches(own[0], family=family)


@BOTH_MODES
async def test_tenants_with_the_same_subnets_are_isolated(lab: NetLab) -> None:
    """N6, W42: by their tags, in routing mode too."""
    hosts = await asyncio.gather(lab.host("one"), lab.host("two"))
    pods: dict[str, list[Pod]] = {}
    for tenant in ("red", "blue"):
        await lab.tenant(tenant)
        await lab.network("net", tenant=tenant, subnet="10.1.0.0/24", gateway="10.1.0.254")
        pods[tenant] = [
            await host.pod(f"{tenant}-{host.name}", tenant=tenant, network="net", address=f"10.1.0.{number}")
            for number, host in enumerate(hosts, start=1)
        ]
    for own, others in (("red", "blue"), ("blue", "red")):
        assert await pods[own][0].eventually_reaches(pods[own][1])
        await pods[others][1].remove()
        # On the second host only the other tenant has this address now.
        assert await pods[others][0].never_reaches(pods[own][1])
        pods[others][1] = await hosts[1].pod(f"{others}-again", tenant=others, network="net", address="10.1.0.2")


async def test_networks_of_both_kinds_are_routed_between(lab: NetLab) -> None:
    """Encapsulation is a property of the network: one of each in a tenant, on two hosts."""
    one, two = await two_hosts(lab)
    await lab.network("tunnelled", subnet="10.2.0.0/16", encap="vxlan")
    a, b = await one.pod("a", network="net"), await two.pod("b", network="tunnelled")
    c, d = await one.pod("c", network="tunnelled"), await two.pod("d", network="net")
    for source, target in ((a, b), (b, a), (a, d), (c, b), (c, a)):
        assert await source.eventually_reaches(target), f"{source.name} to {target.name}"


@pytest.mark.parametrize("fwdmode", ["bridge"])
@pytest.mark.parametrize("mode", ["proxy", "flood"])
async def test_an_external_host_on_the_vlan_is_a_neighbour(lab: NetLab, external: socket.socket, mode: str) -> None:
    """It reaches pods and is reached, with its own tag only; its traffic is subject to policy (W41)."""
    one, two = await two_hosts(lab)
    (await lab.rest.put("globals", name="global", fwdMode="bridge", arpMode=mode)).accepted()
    plug_external()
    pod, other = await one.pod("a", network="net"), await two.pod("b", network="net")
    own, its = EXTERNAL_HOST, (mac_of(pod), address_of(pod))
    request = frame(BROADCAST, own[0], ARP, arp(REQUEST, sender=own, target=("00:00:00:00:00:00", its[1])))
    reply_tag = partial(received_vlan_tag, external, lambda data: is_arp(data) and is_from(its[0])(data))
    external.send(tagged(TAG + 1, request))
    assert await asyncio.to_thread(reply_tag, within=SILENCE_S) is None
    external.send(tagged(TAG, request))
    assert await asyncio.to_thread(reply_tag, within=DEADLINE) == TAG
    with pod.place().open_client(traffic.UDP) as sender:
        sender.sendto(b"?", (str(own[1]), 5000))
        assert await asyncio.to_thread(reply_tag, within=DEADLINE) == TAG  # the pod sends an ARP request
    with open_packet_socket(pod.namespace) as capture, open_packet_socket(other.namespace) as other_capture:
        external.send(tagged(TAG, frame(its[0], own[0], IPV4, datagram(own[1], its[1]))))
        assert await asyncio.to_thread(receives, capture, is_from(own[0]), within=DEADLINE)
        assert not await asyncio.to_thread(
            receives, other_capture, lambda data: is_from(own[0])(data) and not is_arp(data)
        )


@pytest.mark.parametrize("fwdmode", ["bridge"])
async def test_an_address_that_moves_to_another_host_is_reachable(lab: NetLab) -> None:
    """Even if the new endpoint sends nothing, and physical switches know its MAC from the other host."""
    lab.enable_trunk_learning()
    one, two = await two_hosts(lab)
    client = await one.pod("client", network="net")
    for name, host, other in (("first", one, two), ("second", two, one)):
        pod = await host.pod(name, network="net", address="10.1.0.99/16")
        peer = await other.pod(f"peer-{name}", network="net")
        assert await client.eventually_reaches(pod)
        assert await pod.eventually_reaches(peer)
        await pod.remove()


@BOTH_MODES
async def test_host_addresses_spoofed_from_the_uplink_are_dropped(lab: NetLab, external: socket.socket) -> None:
    """W41: policy always allows the pod's own host, but not a sender on the VLAN with the host's address."""
    (await lab.rest.put("policys", tenantName="default", policyName="closed")).accepted()
    rule = {"policyName": "closed", "ruleId": "1", "priority": 1, "direction": "in", "action": "deny"}
    (await lab.rest.put("rules", tenantName="default", **rule)).accepted()
    one, _ = await two_hosts(lab)
    await lab.group("shut", network="net", policies=["closed"])
    plug_external()
    pod = await one.pod("a", network="net", group="shut")
    host = parse_address(one.address, field="host")
    target = mac_of(pod) if lab.fwdmode == "bridge" else overlay_mac(host)
    with open_packet_socket(pod.namespace) as capture:
        external.send(tagged(TAG, frame(target, EXTERNAL_HOST[0], IPV4, datagram(host, address_of(pod)))))
        assert not await asyncio.to_thread(
            receives, capture, lambda data: data[26:30] == host.number.to_bytes(4, "big")
        )
    with ExitStack() as closing:
        assert await traffic.eventually_reaches(host_netns_address(one, closing, 4), pod.place(), port=80)


@pytest.mark.soak
@BOTH_MODES
async def test_H1_a_machine_on_the_vlan_cannot_pass_as_a_pod_of_this_node_or_as_nobody(
    lab: NetLab, external: socket.socket
) -> None:
    """As a pod of another node it can, which the design says: a VLAN authenticates nobody."""
    one, two = await two_hosts(lab)
    await lab.group("friend", network="net")
    (await lab.rest.put("policys", tenantName="default", policyName="closed")).accepted()
    for number, action in enumerate(({"action": "deny"}, {"action": "allow", "fromEndpointGroup": "friend"}), start=1):
        rule = {"policyName": "closed", "ruleId": str(number), "priority": number, "direction": "in", **action}
        (await lab.rest.put("rules", tenantName="default", **rule)).accepted()
    await lab.group("shut", network="net", policies=["closed"])
    plug_external()
    open_pod, shut = await one.pod("open", network="net"), await one.pod("shut", network="net", group="shut")
    near, far = [await host.pod(f"friend-{host.name}", network="net", group="friend") for host in (one, two)]
    for friend in (near, far):
        assert await friend.eventually_reaches(shut)
    nobody = parse_address("10.1.77.77", field="source")

    async def passes(source: Address, target: Pod) -> bool:
        mac = mac_of(target) if lab.fwdmode == "bridge" else overlay_mac(parse_address(one.address, field="host"))
        with open_packet_socket(target.namespace) as capture:
            external.send(tagged(TAG, frame(mac, EXTERNAL_HOST[0], IPV4, datagram(source, address_of(target)))))
            # Not ARP: a pod may be asked for its own address.
            return await asyncio.to_thread(
                receives, capture, lambda data: not is_arp(data) and data[26:30] == source.number.to_bytes(4, "big")
            )

    assert not await passes(address_of(near), open_pod)
    assert not await passes(address_of(near), shut)
    assert not await passes(nobody, shut)
    assert await passes(nobody, open_pod)
    assert await passes(address_of(far), shut)


async def test_the_hosts_own_address_on_an_uplink_stays_reachable(lab: NetLab) -> None:
    """W33: before, while and after the uplink carries VLAN networks."""
    one, two = await two_hosts(lab)
    with ExitStack() as closing:
        addresses = []
        for number, host in enumerate((one, two), start=1):
            inventory.run(host.netns, f"ip address add 198.51.100.{number}/24 dev eth1")
            namespace = closing.enter_context(Namespace.open(host.netns))
            addresses.append(traffic.NetnsAddress(namespace, ip_address(f"198.51.100.{number}")))
        a, b = await one.pod("a", network="net"), await two.pod("b", network="net")
        for again in (False, True):
            if again:
                one.kill()
                await one.start()
            assert await a.eventually_reaches(b)
            assert await traffic.eventually_reaches(*addresses, port=80)
            assert await traffic.eventually_reaches(*reversed(addresses), port=80)


async def test_a_missing_uplink_is_reported(lab: NetLab) -> None:
    """The node is not ready, and the log names the fix; it recovers without a restart."""
    await lab.network("net", subnet="10.1.0.0/16", pktTag=TAG)
    host = await lab.host("one")
    host.kill()
    inventory.run(host.netns, "ip link set eth1 name away0")
    host.launch()
    log = host.home / "netplugin.log"
    await until(lambda: "uplink eth1 is not on this machine: name others by --vlan-uplinks" in log.read_text())
    inventory.run(host.netns, "ip link set away0 name eth1")
    await host.ready()
    switch = host.switch
    assert switch is not None
    await eventually(partial(asyncio.to_thread, uplinks, switch), lambda found: found == {"eth1"})
