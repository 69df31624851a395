"""Which entries of `inet weft_vxlan` follow from state items: who may send what, by VTEP address."""

from __future__ import annotations

import sys

import pytest

from weft.adapters.netns.host.vtep_ruleset import (
    CHAINS,
    ENTRY_SETS,
    SETS,
    VtepConfig,
    chain_commands,
    declare_commands,
    entries_of,
    tenant_number,
)
from weft.domain.addresses import BITS, Address, parse_address
from weft.domain.desired.segments import RemoteMac, encap_id, vlan_tag
from weft.domain.desired.state import Gateway, Overlay, Prefix, RemoteRoute, StateItem, TenantNetns, VxlanPeer
from weft.domain.host_access.state import HostLink, RemoteHostReturnRoute
from weft.domain.ids import TenantName
from weft.domain.ipam.allocator import BLOCK_SIZE
from weft.domain.model import NetworkTags

BLUE, RED = TenantName("blue"), TenantName("red")
OWN = VtepConfig(parse_address("192.0.2.1", field="vtep"), 4789)
VNI, PEER, PEER6 = 5001, "192.0.2.2", "2001:db8::2"
VLAN = encap_id(NetworkTags(vlan=7))
PODS = {4: parse_address("10.1.0.5", field="pod"), 6: parse_address("2001:db8:1::5", field="pod")}


def sets_of(item: StateItem, config: VtepConfig = OWN) -> list[str]:
    return sorted(entry.name for entry in entries_of(item, config))


def route(address: Address, *, length: int, vtep: str = PEER, vni: int = VNI, tenant: TenantName = BLUE) -> RemoteRoute:
    return RemoteRoute(tenant, Prefix(address.family, address.number, length), vni, vtep)


@pytest.mark.parametrize("family", [4, 6])
def test_a_remote_workload_is_known_and_belongs_to_the_vtep_of_its_node(family: int) -> None:
    pod = PODS[family]
    wanted = [f"inner_known{family}", f"inner_owners{family}"]
    assert sets_of(route(pod, length=BITS[family])) == wanted
    assert sets_of(RemoteMac(BLUE, VNI, PEER, "02:00:00:00:00:05", (pod,))) == wanted
    assert sets_of(RemoteHostReturnRoute(BLUE, VNI, PEER, pod)) == wanted


@pytest.mark.parametrize("family", [4, 6])
def test_a_block_is_known_by_its_first_address(family: int) -> None:
    base = Address(family, PODS[family].number - PODS[family].number % BLOCK_SIZE)
    length = BITS[family] - (BLOCK_SIZE.bit_length() - 1)
    assert sets_of(route(base, length=length)) == [f"block_known{family}", f"block_owners{family}"]
    # A prefix of any other length has no key that a packet could be compared with.
    assert not sets_of(route(base, length=length - 1))


def test_one_address_of_two_tenants_or_two_nodes_has_separate_entries() -> None:
    first = {*entries_of(route(PODS[4], length=32), OWN)}
    other_tenant = {*entries_of(route(PODS[4], length=32, tenant=RED), OWN)}
    other_node = {*entries_of(route(PODS[4], length=32, vtep="192.0.2.3"), OWN)}
    assert not first & other_tenant
    # While a workload moves, both nodes may send as it: the address is known once, with two owners.
    assert {entry.name for entry in first & other_node} == {"inner_known4"}
    assert {entry.name for entry in first ^ other_node} == {"inner_owners4"}


def test_a_vtep_of_the_other_address_family_is_no_peer_and_its_workloads_have_no_owner() -> None:
    """No tunnel leads there, so whoever sends as them is not their node."""
    assert sets_of(VxlanPeer(BLUE, VNI, PEER)) == ["vtep_peers"]
    assert not sets_of(VxlanPeer(BLUE, VNI, PEER6))
    assert sets_of(route(PODS[4], length=32, vtep=PEER6)) == ["inner_known4"]
    own6 = VtepConfig(parse_address("2001:db8::1", field="vtep"), 4789)
    assert sets_of(VxlanPeer(BLUE, VNI, PEER6), own6) == ["vtep_peers"]
    assert not sets_of(VxlanPeer(BLUE, VNI, PEER), own6)


def test_addresses_of_the_own_host_are_known_and_belong_to_no_vtep() -> None:
    assert sets_of(HostLink(BLUE, (*PODS.values(),))) == ["inner_known4", "inner_known6"]


def test_a_gateway_can_be_announced_by_nobody_and_is_a_source_like_others() -> None:
    for family, address in PODS.items():
        assert sets_of(Gateway(BLUE, address)) == [f"gateways{family}"]


def test_vlan_networks_have_no_entries() -> None:
    """Nothing of them comes through a tunnel."""
    assert vlan_tag(VLAN)
    for item in (
        route(PODS[4], length=32, vni=VLAN),
        RemoteMac(BLUE, VLAN, PEER, "02:00:00:00:00:05", (PODS[4],)),
        RemoteHostReturnRoute(BLUE, VLAN, PEER, PODS[4]),
    ):
        assert not sets_of(item)


def test_a_vni_leads_to_the_number_of_its_tenant() -> None:
    (entry,) = entries_of(Overlay(BLUE, VNI), OWN)
    assert entry.element.key == VNI.to_bytes(3, "big")
    assert entry.element.value == tenant_number(BLUE).to_bytes(4, sys.byteorder)
    assert not sets_of(TenantNetns(BLUE))


def test_numbers_of_tenants_are_distinct_and_never_that_of_an_unknown_vni() -> None:
    """A packet of an unknown VNI keeps priority 0."""
    numbers = {tenant_number(TenantName(f"tenant-{index}")) for index in range(2000)}
    assert len(numbers) == 2000
    assert 0 not in numbers


def test_received_packets_are_picked_only_with_an_overlay() -> None:
    """Without one, other programs may use the port."""
    pick = f"udp dport {OWN.port} goto vxlan_decap"
    assert pick in chain_commands(OWN)
    without = chain_commands(OWN, receiving=False)
    assert pick not in without
    assert "goto vxlan_encap" in without


@pytest.mark.parametrize("vtep", ["192.0.2.1", "2001:db8::1"])
def test_commands_name_all_documented_chains_and_sets(vtep: str) -> None:
    config = VtepConfig(parse_address(vtep, field="vtep"), 8472)
    commands = declare_commands(config) + chain_commands(config)
    for name in (*CHAINS, *SETS):
        stem, _, families = name.partition("{")
        for suffix in families.rstrip("}").split(","):
            assert f"{stem}{suffix}" in commands, name
    assert all(name in commands for name in ENTRY_SETS)
    assert "4789" not in commands
