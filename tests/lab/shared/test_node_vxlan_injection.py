"""H1: crafted VXLAN packets reach no pod, whoever sends them, unless the node sends them that has the inner source.

Attackers: a pod through an infra network, a process of the host, a machine of the underlay that is no node, and a node
that spoofs workloads of other nodes. The last one sends by a packet socket, so that none of its own rules stops it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support import inventory
from tests.support.connectivity import FAMILIES, assert_connectivity, between
from tests.support.ethernet import ARP, REPLY, arp, frame, is_from, open_packet_socket, receives, tagged
from tests.support.sequence_stream import Stream
from tests.support.tenant_fixture import TenantFixture
from tests.support.vxlan import ETHER_TYPES, advertisement, behind_options, link_mac, send, send_raw, vxlan
from tests.support.vxlan_injection import NOBODY, PORT, Container, Scene, address_of

from weft.domain import kinds
from weft.domain.addresses import parse_address
from weft.domain.ids import NodeName
from weft.domain.store_types import Delete
from weft.drivers import RemoteStoreSettings, open_store
from weft.kernel.netns import Namespace
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.waiting import DEADLINE, eventually, until

BRIDGED = ("linux-vxlan-bridge", "ovs-vxlan-bridge")

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize(
        "lab",
        ["linux", "ovs", *(pytest.param(name, marks=pytest.mark.soak) for name in BRIDGED)],
        indirect=True,
        scope="module",
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def built(lab: NetLab, make_tenant: Callable[[], TenantFixture]) -> Scene:
    """One scene for all tests: no attack changes it."""
    await lab.host("three")
    testbed = make_tenant()
    await testbed.build()
    scene = Scene(testbed, [lab.hosts[name] for name in ("one", "two", "three")])
    await scene.build()
    return scene


@pytest_asyncio.fixture(loop_scope="module")
async def scene(built: Scene) -> AsyncIterator[Scene]:
    try:
        yield built
        # The tunnels still work.
        await assert_connectivity(allowed=between([built.friend_two, built.friend_three], [built.closed], "udp/53"))
    finally:
        built.lab.print_logs()


async def test_H1_a_machine_that_is_no_node_cannot_inject(scene: Scene) -> None:
    with Namespace.current() as machine:
        attack = partial(send, machine, scene.vtep(scene.one))
        assert not await scene.arrived(attack, scene.sources(), scene.open, scene.closed)
    await until_counted(scene.one, "weft/unknown-vtep")


async def test_H1_a_process_of_a_host_cannot_inject(scene: Scene) -> None:
    """Neither at its own node nor at another one."""
    for host, target in (
        (scene.one, "127.0.0.1"),
        (scene.one, scene.vtep(scene.one)),
        (scene.two, scene.vtep(scene.one)),
    ):
        with Namespace.open(host.netns) as namespace:
            attack = partial(send, namespace, target)
            assert not await scene.arrived(attack, scene.sources(), scene.open, scene.closed), f"{host.name} {target}"
        await until_counted(host, "weft/unknown-vtep")


async def test_H1_a_pod_cannot_inject_through_an_infra_network(scene: Scene) -> None:
    await scene.lab.network(
        "mgmt", tenant="default", subnet="10.60.0.0/24", ipv6Subnet="2001:db8:60::/64", nwType="infra"
    )
    await scene.lab.network("data", tenant="default", subnet="10.61.0.0/24", ipv6Subnet="2001:db8:61::/64")
    attacker = await scene.one.pod("attacker", network="data")

    def addresses() -> list[str]:
        listed = inventory.run_json(scene.one.netns, "ip", "-j", "addr")
        found = (each["local"] for link in listed for each in link["addr_info"])
        return [text for text in found if text.startswith(("10.60.", "2001:db8:60:"))]

    try:
        for target in [
            *await eventually(partial(asyncio.to_thread, addresses), lambda found: len(found) == 2),
            scene.vtep(scene.one),
            scene.vtep(scene.two),
        ]:
            attack = partial(send, attacker.namespace, target)
            assert not await scene.arrived(attack, scene.sources(), scene.open, scene.closed), target
    finally:
        await attacker.remove()
        for name in ("data", "mgmt"):
            delete = partial(scene.lab.rest.delete, "networks", f"default:{name}")
            await eventually(delete, lambda answer: answer.status == 200)


async def test_H1_a_node_cannot_spoof_workloads_of_other_nodes(scene: Scene) -> None:
    """The second node sends as pods of the first and the third one. As its own pod it may send."""
    attack = scene.as_node(scene.two)
    foreign = [address_of(pod, family) for pod in (scene.near, scene.friend_three) for family in FAMILIES]
    assert not await scene.arrived(attack, foreign, scene.open, scene.closed)
    own = [address_of(scene.friend_two, family) for family in FAMILIES]
    assert len(await scene.arrived(attack, own, scene.open, scene.closed)) == 4  # so the packets are well-formed
    await until_counted(scene.one, "weft/spoofed")


async def test_H1_a_node_cannot_announce_workloads_of_other_nodes(scene: Scene) -> None:
    """By ARP, or by a neighbour advertisement in a packet of its own pod. Its own pod it may announce."""
    pods, sent, seen = (scene.friend_two, scene.friend_three, scene.near), dict[bytes, tuple[str, str]](), set[bytes]()

    def note(data: bytes) -> bool:
        seen.add(data[6:12])
        return False  # all that come within the time

    with open_packet_socket(scene.open.namespace) as capture:
        for number, pod in enumerate(pods):
            for kind, announced in announcements(scene, pod, prefix=f"02:aa:aa:aa:{number:02x}").items():
                scene.as_node(scene.two)(vxlan(scene.vni, announced))
                sent[announced[6:12]] = kind, pod.name
        await asyncio.to_thread(receives, capture, note)
    own = {("ARP", scene.friend_two.name), ("ND", scene.friend_two.name)}
    # In routing mode nodes forward neither ARP nor ND.
    assert {sent[mac] for mac in seen & sent.keys()} == (own if scene.lab.fwdmode == "bridge" else set())


async def test_H1_a_node_cannot_announce_the_gateway(scene: Scene) -> None:
    """Each node answers for it. A pod that believed another one would send it all that leaves its network."""
    gateways = {4: "10.70.0.254", 6: "2001:db8:70::fe"}
    subnets = {"subnet": "10.70.0.0/24", "ipv6Subnet": "2001:db8:70::/64"}
    await scene.lab.network("gw", tenant="default", gateway=gateways[4], ipv6Gateway=gateways[6], **subnets)
    pod, other = [await host.pod(f"gw-{host.name}", network="gw") for host in (scene.one, scene.two)]
    assert await other.eventually_reaches(pod)
    vni = (await scene.lab.rest.oper("networks", "default:gw"))["externalPktTag"]
    rogue, mac = "02:aa:aa:aa:aa:aa", link_mac(pod.netns)
    address4, address6 = (parse_address(text, field="gateway") for text in gateways.values())
    by_arp = arp(REPLY, sender=(rogue, address4), target=(mac, address_of(pod, 4)))
    by_nd = advertisement(address6, source=address_of(other, 6), to=address_of(pod, 6), mac=rogue)
    with open_packet_socket(pod.namespace) as capture:
        for kind, content in ((ARP, by_arp), (ETHER_TYPES[6], by_nd)):
            scene.as_node(scene.two)(vxlan(vni, frame(mac, rogue, kind, content)))
        assert not await asyncio.to_thread(receives, capture, is_from(rogue))


@pytest.mark.parametrize("tag", [0, 5])
async def test_H1_a_node_cannot_hide_an_inner_source_behind_a_vlan_tag(scene: Scene, tag: int) -> None:
    """The kernel would remove a priority tag (0) and deliver the packet."""
    attack = scene.as_node(scene.two)
    foreign = [address_of(pod, family) for pod in (scene.near, scene.friend_three) for family in FAMILIES]
    before = dropped_packets(scene.one, "weft/spoofed")
    assert not await scene.arrived(lambda payload: attack(payload[:8] + tagged(tag, payload[8:])), foreign, scene.open)
    await until(lambda: dropped_packets(scene.one, "weft/spoofed") > before)


async def test_H1_a_container_network_of_a_node_cannot_inject(scene: Scene) -> None:
    """Neither through NAT of its node, as that node, nor at its own node with the address of another one."""
    own = [address_of(scene.friend_two, family) for family in FAMILIES]
    with Container(scene.two) as container:
        assert await container.reaches(scene.one)  # by NAT, at a port that is not the tunnels'
        before = dropped_packets(scene.two, "weft/unknown-vtep")
        attack = partial(send, container.namespace, scene.vtep(scene.one))
        assert not await scene.arrived(attack, own, scene.open, scene.closed)
        await until(lambda: dropped_packets(scene.two, "weft/unknown-vtep") > before)
    with Container(scene.one) as container:
        outer = scene.vtep(scene.two), scene.vtep(scene.one)
        before = dropped_packets(scene.one, "weft/unknown-vtep")
        attack = partial(send_raw, container.namespace, macs=container.macs, outer=outer)
        assert not await scene.arrived(attack, own, scene.open, scene.closed)
        await until(lambda: dropped_packets(scene.one, "weft/unknown-vtep") > before)


async def test_H1_an_unknown_source_does_not_pass_ingress_rules(scene: Scene) -> None:
    """Nobody has evaluated policy for an address that nobody has. Without ingress rules it passes."""
    attack = scene.as_node(scene.two)
    assert not await scene.arrived(attack, NOBODY.values(), scene.closed)
    assert len(await scene.arrived(attack, NOBODY.values(), scene.open)) == 2


async def test_H1_tunnels_lose_no_packet_while_nodes_join_and_leave_and_agents_restart(scene: Scene) -> None:
    """Also while another process deletes the table, which comes back. A node that has left can send nothing."""
    table = ("nft", "-j", "list", "set", "inet", "weft_vxlan", "vtep_peers")
    with Stream(scene.friend_two.place(), scene.open.place(), port=PORT + 1, rate=200) as stream:
        # A name of its own: hosts stay in the lab of the module.
        four = await scene.lab.host(f"four-{scene.testbed.tenant}")
        late_friend = await scene.testbed.pod(four, "friend")
        await assert_connectivity(allowed=between([late_friend], [scene.closed], "udp/53"))
        scene.one.kill()
        await scene.one.start()
        inventory.run(scene.one.netns, "nft delete table inet weft_vxlan")
        await eventually(
            partial(asyncio.to_thread, set_elements, scene.one.netns, *table), lambda found: four.address in found
        )
        own = [address_of(late_friend, 4)]
        assert await scene.arrived(scene.as_node(four), own, scene.open)
        four.kill()
        await forget_node(scene.lab, four)
        await eventually(
            partial(asyncio.to_thread, set_elements, scene.one.netns, *table), lambda found: four.address not in found
        )
        assert not await scene.arrived(scene.as_node(four), own, scene.open)
        stream.stop()
        assert not await stream.missing()
        assert stream.sent > 0


def announcements(scene: Scene, pod: Pod, *, prefix: str) -> dict[str, bytes]:
    """Frames to the open pod that say other MACs, which begin with the prefix, have the addresses of a pod."""
    to, mac = scene.open, link_mac(scene.open.netns)
    rogue = [f"{prefix}:{number:02x}" for number in range(3)]
    sender, target = (rogue[0], address_of(pod, 4)), (mac, address_of(to, 4))
    nd = partial(advertisement, address_of(pod, 6), source=address_of(scene.friend_two, 6), to=address_of(to, 6))
    return {
        "ARP": frame(mac, rogue[0], ARP, arp(REPLY, sender=sender, target=target)),
        "ND": frame(mac, rogue[1], ETHER_TYPES[6], nd(mac=rogue[1])),
        "ND behind options": frame(mac, rogue[2], ETHER_TYPES[6], behind_options(nd(mac=rogue[2]))),
    }


async def forget_node(lab: NetLab, host: Host) -> None:
    """Delete the registration of a node whose agent is gone, as garbage collection does."""
    settings = RemoteStoreSettings(endpoints=(f"unix:{lab.store_socket}",), node=host.name)
    async with open_store(settings) as store:
        await store.commit([], [Delete(kinds.NODE.store_key(NodeName(host.name)))])


def set_elements(namespace: Path, *command: str) -> set[str]:
    """The elements of an nft set; none while it does not exist."""
    full = ["nsenter", f"--net={namespace}", "--", *command]
    listed = subprocess.run(full, check=False, capture_output=True, text=True, timeout=DEADLINE).stdout
    found = (each.get("set", {}) for each in json.loads(listed or "{}").get("nftables", ()))
    return {element for each in found for element in each.get("elem", ())}


async def until_counted(host: Host, reason: str) -> None:
    """Wait until a host's metrics count packets dropped for a reason."""
    await until(lambda: dropped_packets(host, reason) > 0)


def dropped_packets(host: Host, reason: str) -> float:
    command = ["nsenter", f"--net={host.netns}", "--", "curl", "-sf", "http://127.0.0.1:9090/metrics"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE).stdout
    lines = (line for line in text.splitlines() if line.startswith("weft_dropped_packets_total{") and reason in line)
    return sum(float(line.rpartition(" ")[2]) for line in lines)
