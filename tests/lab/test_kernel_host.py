"""The host side of host access: our objects in the host netns, next to those of others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weft.adapters.netns.diagnostics import foreign_drops
from weft.adapters.netns.host.network import HostNetwork, host_link_name
from weft.adapters.netns.host.ruleset import HostConfig
from weft.adapters.netns.tenant_netns import TenantNetnsDriver
from weft.domain.addresses import Address, Range, parse_address, parse_subnet_v4
from weft.domain.desired.state import StateItem
from weft.domain.host_access.state import ExternalAddress, HostLink, HostPort, NodePort, NodePortVip, TenantSubnet
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import FrontendKey, FrontendSources
from weft.domain.policy.model.protocols import TCP, UDP
from weft.kernel.netns import NamespaceDirectory
from weft.lab.waiting import DEADLINE

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns

BLUE = TenantName("blue")
OWN = parse_address("192.0.2.1", field="own")
LINK = HostLink(BLUE, (OWN, Address(6, 0xFD << 120 | OWN.number)))
SUBNET = TenantSubnet(BLUE, parse_subnet_v4("10.1.0.0/16"), routed=True)
PORT = HostPort(BLUE, 4, TCP, 8080, parse_address("10.1.0.5", field="pod"), 80)
NAME = host_link_name(BLUE)
# A listener of the host.
RESERVED = 9090


@pytest.fixture
def tenant(directory: NamespaceDirectory) -> Iterator[TenantNetnsDriver]:
    with TenantNetnsDriver(directory.create("blue")) as netns:
        netns.prepare()
        yield netns


class Machine:
    """The host netns, read with `ip` and `nft`, and the `HostNetwork` in it."""

    def __init__(self, here: TenantNetns, network: HostNetwork) -> None:
        self.here = here
        self.network = network

    def run(self, command: str) -> None:
        self.here.ask(*command.split())

    def add_tenant(self, tenant: TenantNetnsDriver, *items: StateItem) -> None:
        self.network.put_link(LINK, tenant, mtu=1400)
        self.network.change(drop=(), put=(LINK, *items))

    def routes(self) -> dict[str, str]:
        return {each["dst"]: each["dev"] for each in self.here.ask("ip", "-j", "-4", "route")}

    def tables(self) -> set[str]:
        listed = self.here.ask("nft", "-j", "list", "tables")["nftables"]
        return {each["table"]["name"] for each in listed if "table" in each}

    def devices(self) -> set[str]:
        return {each["ifname"] for each in self.here.ask("ip", "-j", "link")}


@pytest.fixture
def machine(here: TenantNetns) -> Iterator[Machine]:
    here.namespace.write_sysctls({"net/ipv6/conf/default/accept_ra": "1", "net/ipv6/conf/lo/accept_ra": "0"})
    with ExitStack() as closing:
        network = HostNetwork(here.namespace, here.route, HostConfig(OWN, 4789, reserved_ports=((TCP, RESERVED),)))
        closing.callback(network.close)
        machine = Machine(here, network)
        machine.run("ip link add name eth0 type bridge")
        machine.run("ip addr add 192.0.2.1/24 dev eth0")
        machine.run("ip link set eth0 up")
        yield machine


def test_a_tenant_is_added_and_removed(machine: Machine, tenant: TenantNetnsDriver) -> None:
    before = machine.devices(), machine.routes(), machine.tables()
    machine.add_tenant(tenant, SUBNET, PORT)
    assert machine.routes()["10.1.0.0/16"] == NAME
    assert machine.tables() == {"weft_host"}
    machine.network.change(drop=(LINK, SUBNET, PORT), put=())
    machine.network.drop_link(BLUE)
    assert (machine.devices(), machine.routes(), machine.tables()) == before


def test_a_link_is_created_once_and_again_for_a_new_netns(
    machine: Machine, tenant: TenantNetnsDriver, directory: NamespaceDirectory
) -> None:
    assert machine.network.put_link(LINK, tenant, mtu=1400)
    assert not machine.network.put_link(LINK, tenant, mtu=1400)
    with TenantNetnsDriver(directory.create("new")) as other:
        other.prepare()
        assert machine.network.put_link(LINK, other, mtu=1400)


def test_a_route_of_the_host_is_preferred_to_ours(machine: Machine, tenant: TenantNetnsDriver) -> None:
    machine.run("ip route add 10.1.0.0/16 dev eth0")
    machine.add_tenant(tenant, SUBNET)
    used = machine.here.ask("ip", "-j", "route", "get", "10.1.0.5")[0]["dev"]
    machine.network.change(drop=(LINK, SUBNET), put=())
    assert (used, machine.routes()["10.1.0.0/16"]) == ("eth0", "eth0")


def test_forwarding_keeps_accepting_router_advertisements(machine: Machine, tenant: TenantNetnsDriver) -> None:
    """With forwarding on, `accept_ra` must be 2: else the host would lose its default route."""
    machine.add_tenant(tenant)
    settings = ("ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv6/conf/eth0/accept_ra", "ipv6/conf/lo/accept_ra")
    read = machine.here.namespace.run(lambda: [Path("/proc/sys/net", name).read_text().strip() for name in settings])
    assert read == ["1", "1", "2", "0"]


def test_a_foreign_firewall_gets_an_accept_rule(machine: Machine, tenant: TenantNetnsDriver) -> None:
    """docker and ufw drop by default; their rules stay, and `weft doctor` reports the chain."""
    machine.run("nft add table ip filter")
    machine.run("nft add chain ip filter FORWARD { type filter hook forward priority 0 ; policy drop ; }")
    chain = ("nft", "-j", "list", "chain", "ip", "filter", "FORWARD")
    firewall = machine.here.ask(*chain)
    machine.add_tenant(tenant)
    assert machine.network.converge({LINK}) == [], "once is enough"
    (described,) = foreign_drops()
    assert described == "chain FORWARD of table ip filter drops by default; a rule of ours accepts workloads"
    machine.network.change(drop=(LINK,), put=())
    assert machine.here.ask(*chain) == firewall


def test_unneeded_links_and_routes_are_removed(machine: Machine, tenant: TenantNetnsDriver) -> None:
    machine.add_tenant(tenant, SUBNET)
    assert machine.network.converge(set()) == [f"host: removed device {NAME}"]
    assert "10.1.0.0/16" not in machine.routes()
    assert machine.tables() == set()


NODEPORT_VIP = NodePortVip(BLUE, (parse_address("172.19.255.1", field="vip"), parse_address("fd77::1", field="vip")))
FRONTEND = FrontendKey(parse_address("198.51.100.8", field="external"), TCP, 80)
ENTRIES: list[StateItem] = [
    NODEPORT_VIP,
    PORT,
    HostPort(BLUE, 4, TCP, 8081, parse_address("10.1.0.6", field="pod"), 81, OWN),
    NodePort(BLUE, TCP, 30080),
    NodePort(BLUE, UDP, 30080),
    ExternalAddress(BLUE, parse_address("10.96.0.1", field="vip"), "host"),
    ExternalAddress(BLUE, parse_address("10.96.0.10", field="vip"), "tenants"),
    ExternalAddress(BLUE, parse_address("198.51.100.7", field="external"), "world"),
    ExternalAddress(BLUE, parse_address("2001:db8:eeee::7", field="external"), "world"),
    ExternalAddress(BLUE, parse_address("198.51.100.8", field="external"), "world"),
    FrontendSources(BLUE, FRONTEND, (Range(4, 5, 12), Range(4, 20, 20))),
    FrontendSources(BLUE, FRONTEND._replace(external=True), (Range(4, 7, 30),)),
    FrontendSources(BLUE, FRONTEND._replace(port=443), ()),
]


def set_elements(machine: Machine) -> dict[str, Any]:
    """The elements of each set and map of the host table."""
    listed = machine.here.ask("nft", "-j", "list", "table", "inet", "weft_host")["nftables"]
    sets = [each[kind] for each in listed for kind in ("set", "map") if kind in each]
    return {each["name"]: sorted(map(str, each.get("elem", ()))) for each in sets}


def test_changing_elements_equals_replacing_the_table(machine: Machine, tenant: TenantNetnsDriver) -> None:
    """Changing single elements, as services do, gives the same table as replacing it."""
    machine.add_tenant(tenant)
    bare = set_elements(machine), machine.routes()
    for item in ENTRIES:
        machine.network.change(drop=(), put=(item,))
    one_by_one = set_elements(machine), machine.routes()
    assert one_by_one != bare
    assert machine.network.converge({LINK, *ENTRIES}) == []
    assert (set_elements(machine), machine.routes()) == one_by_one
    for item in ENTRIES:
        machine.network.change(drop=(item,), put=())
    assert (set_elements(machine), machine.routes()) == bare


def test_a_table_changed_by_others_is_replaced(machine: Machine, tenant: TenantNetnsDriver) -> None:
    machine.add_tenant(tenant, *ENTRIES)
    before = set_elements(machine)
    machine.network.change(drop=(ENTRIES[3],), put=())
    for command in ("nft flush map inet weft_host node_ports4", "nft delete table inet weft_host"):
        machine.run(command)
        machine.network.change(drop=(), put=(ENTRIES[3],))
        machine.network.change(drop=(ENTRIES[4],), put=())
        machine.network.change(drop=(), put=(ENTRIES[4],))
        assert set_elements(machine) == before
        machine.network.change(drop=(ENTRIES[3],), put=())


def test_a_node_port_of_several_tenants_goes_to_the_first(machine: Machine, tenant: TenantNetnsDriver) -> None:
    red = TenantName("red")
    theirs = NodePortVip(red, (parse_address("172.19.255.2", field="vip"),))
    machine.add_tenant(tenant, theirs, NodePort(red, TCP, 30080))
    assert "172.19.255.2" in str(set_elements(machine)["node_ports4"])
    machine.network.change(drop=(), put=(NODEPORT_VIP, NodePort(BLUE, TCP, 30080)))
    assert "172.19.255.1" in str(set_elements(machine)["node_ports4"])
    machine.network.change(drop=(NodePort(BLUE, TCP, 30080),), put=())
    assert "172.19.255.2" in str(set_elements(machine)["node_ports4"])


def test_a_host_port_of_several_services_goes_to_one_of_them(machine: Machine, tenant: TenantNetnsDriver) -> None:
    """Two services may have the same external IP: the table must stay valid."""
    outer = parse_address("198.51.100.7", field="external")
    ports = [HostPort(BLUE, 4, TCP, 80, NODEPORT_VIP.addresses[0], number, outer) for number in (30080, 30081)]
    machine.add_tenant(tenant, *ports)
    machine.network.change(drop=(), put=(HostPort(BLUE, 4, TCP, 80, NODEPORT_VIP.addresses[0], 30079, outer),))
    (one,) = set_elements(machine)["host_ports_by_ip4"]
    assert "30079" in one
    machine.network.change(drop=(HostPort(BLUE, 4, TCP, 80, NODEPORT_VIP.addresses[0], 30079, outer),), put=())
    (one,) = set_elements(machine)["host_ports_by_ip4"]
    assert "30080" in one


@pytest.mark.parametrize("mapped", ["address", "any", "node port"])
def test_M1_a_listener_of_the_host_keeps_its_reserved_port(
    machine: Machine, tenant: TenantNetnsDriver, mapped: str
) -> None:
    """Whatever asks for it: a host port, an external address that the host has, or a node port."""
    items: dict[str, StateItem] = {
        "address": HostPort(BLUE, 4, TCP, RESERVED, parse_address("10.1.0.5", field="pod"), 80, OWN),
        "any": HostPort(BLUE, 4, TCP, RESERVED, parse_address("10.1.0.5", field="pod"), 80),
        "node port": NodePort(BLUE, TCP, RESERVED),
    }
    machine.add_tenant(tenant, SUBNET, NODEPORT_VIP, items[mapped])
    with (
        machine.here.namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM) as listener,
        machine.here.namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM) as caller,
    ):
        listener.bind((str(OWN), RESERVED))
        listener.listen()
        caller.settimeout(DEADLINE)
        caller.connect((str(OWN), RESERVED))
