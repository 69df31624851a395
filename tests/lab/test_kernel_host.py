"""The host's side of host access: what is made in a namespace where most things are others', and what is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weft.adapters.netns.diagnostics import foreign_drops
from weft.adapters.netns.host.network import HostNetwork, host_link_name
from weft.adapters.netns.host.ruleset import HostSurroundings
from weft.adapters.netns.tenant_netns import TenantNetnsDriver
from weft.domain.addresses import Address, Range, parse_address, parse_subnet_v4
from weft.domain.desired.state import StateItem
from weft.domain.host_access.state import ExternalAddress, HostLink, HostPort, NodePort, NodePortVip, TenantSubnet
from weft.domain.ids import TenantName
from weft.domain.policy.model.protocols import TCP, UDP
from weft.kernel.netns import NamespaceDirectory

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns

BLUE = TenantName("blue")
OWN = parse_address("192.0.2.1", field="own")
LINK = HostLink(BLUE, (OWN, Address(6, 0xFD << 120 | OWN.number)))
GROUND = TenantSubnet(BLUE, parse_subnet_v4("10.1.0.0/16"), routed=True)
PORT = HostPort(BLUE, 4, TCP, 8080, parse_address("10.1.0.5", field="pod"), 80)
NAME = host_link_name(BLUE)


@pytest.fixture
def tenant(directory: NamespaceDirectory) -> Iterator[TenantNetnsDriver]:
    with TenantNetnsDriver(directory.create("blue")) as space:
        space.prepare()
        yield space


class Machine:
    """The host's namespace as the usual tools see it, and our side of it."""

    def __init__(self, here: TenantNetns, side: HostNetwork) -> None:
        self.here = here
        self.side = side

    def run(self, command: str) -> None:
        self.here.ask(*command.split())

    def join(self, tenant: TenantNetnsDriver, *parts: StateItem) -> None:
        self.side.put_link(LINK, tenant, mtu=1400)
        self.side.change(drop=(), put=(LINK, *parts))

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
        side = HostNetwork(here.namespace, here.route, HostSurroundings(OWN, 4789))
        closing.callback(side.close)
        machine = Machine(here, side)
        machine.run("ip link add name eth0 type bridge")
        machine.run("ip addr add 192.0.2.1/24 dev eth0")
        machine.run("ip link set eth0 up")
        yield machine


def test_a_tenant_comes_and_goes(machine: Machine, tenant: TenantNetnsDriver) -> None:
    before = machine.devices(), machine.routes(), machine.tables()
    machine.join(tenant, GROUND, PORT)
    assert machine.routes()["10.1.0.0/16"] == NAME
    assert machine.tables() == {"weft_host"}
    machine.side.change(drop=(LINK, GROUND, PORT), put=())
    machine.side.drop_link(BLUE)
    assert (machine.devices(), machine.routes(), machine.tables()) == before


def test_a_link_is_made_once_and_again_for_a_new_space(
    machine: Machine, tenant: TenantNetnsDriver, directory: NamespaceDirectory
) -> None:
    assert machine.side.put_link(LINK, tenant, mtu=1400)
    assert not machine.side.put_link(LINK, tenant, mtu=1400)
    with TenantNetnsDriver(directory.create("new")) as other:
        other.prepare()
        assert machine.side.put_link(LINK, other, mtu=1400)


def test_a_route_of_the_host_itself_is_better_than_ours(machine: Machine, tenant: TenantNetnsDriver) -> None:
    machine.run("ip route add 10.1.0.0/16 dev eth0")
    machine.join(tenant, GROUND)
    used = machine.here.ask("ip", "-j", "route", "get", "10.1.0.5")[0]["dev"]
    machine.side.change(drop=(LINK, GROUND), put=())
    assert (used, machine.routes()["10.1.0.0/16"]) == ("eth0", "eth0")


def test_the_host_forwards_and_still_hears_its_routers(machine: Machine, tenant: TenantNetnsDriver) -> None:
    """A host that forwards ignores routers unless it is told twice: it would lose its way out."""
    machine.join(tenant)
    settings = ("ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv6/conf/eth0/accept_ra", "ipv6/conf/lo/accept_ra")
    read = machine.here.namespace.run(lambda: [Path("/proc/sys/net", name).read_text().strip() for name in settings])
    assert read == ["1", "1", "2", "0"]


def test_a_firewall_of_others_is_passed_by_a_marked_rule(machine: Machine, tenant: TenantNetnsDriver) -> None:
    """docker and ufw drop what they do not know; theirs stays theirs, and doctor tells of it."""
    machine.run("nft add table ip filter")
    machine.run("nft add chain ip filter FORWARD { type filter hook forward priority 0 ; policy drop ; }")
    chain = ("nft", "-j", "list", "chain", "ip", "filter", "FORWARD")
    firewall = machine.here.ask(*chain)
    machine.join(tenant)
    assert machine.side.converge({LINK}) == [], "once is enough"
    (told,) = foreign_drops()
    assert told == "chain FORWARD of table ip filter drops what it does not know; workloads pass by a rule of ours"
    machine.side.change(drop=(LINK,), put=())
    assert machine.here.ask(*chain) == firewall


def test_what_is_nobodys_is_removed(machine: Machine, tenant: TenantNetnsDriver) -> None:
    machine.join(tenant, GROUND)
    assert machine.side.converge(set()) == [f"host: removed device {NAME}"]
    assert "10.1.0.0/16" not in machine.routes()
    assert machine.tables() == set()


DOOR = NodePortVip(BLUE, (parse_address("172.19.255.1", field="door"), parse_address("fd77::1", field="door")))
OPENINGS: list[StateItem] = [
    DOOR,
    PORT,
    HostPort(BLUE, 4, TCP, 8081, parse_address("10.1.0.6", field="pod"), 81, OWN),
    NodePort(BLUE, TCP, 30080),
    NodePort(BLUE, UDP, 30080),
    ExternalAddress(BLUE, parse_address("10.96.0.1", field="vip"), "host"),
    ExternalAddress(BLUE, parse_address("10.96.0.10", field="vip"), "tenants"),
    ExternalAddress(BLUE, parse_address("198.51.100.7", field="outer"), "world"),
    ExternalAddress(BLUE, parse_address("2001:db8:eeee::7", field="outer"), "world"),
    ExternalAddress(BLUE, parse_address("198.51.100.8", field="outer"), "world", (Range(4, 5, 9), Range(4, 7, 12))),
    ExternalAddress(BLUE, parse_address("198.51.100.8", field="outer"), "world"),
    ExternalAddress(BLUE, parse_address("198.51.100.9", field="outer"), "world", ()),
]


def held(machine: Machine) -> dict[str, Any]:
    """What each set and map of the host's table holds."""
    listed = machine.here.ask("nft", "-j", "list", "table", "inet", "weft_host")["nftables"]
    sets = [each[kind] for each in listed for kind in ("set", "map") if kind in each]
    return {each["name"]: sorted(map(str, each.get("elem", ()))) for each in sets}


def test_openings_come_and_go_one_by_one_as_all_at_once(machine: Machine, tenant: TenantNetnsDriver) -> None:
    """By single elements, which is what services cost, the table becomes what it is when it is made anew."""
    machine.join(tenant)
    bare = held(machine), machine.routes()
    for part in OPENINGS:
        machine.side.change(drop=(), put=(part,))
    one_by_one = held(machine), machine.routes()
    assert one_by_one != bare
    assert machine.side.converge({LINK, *OPENINGS}) == []
    assert (held(machine), machine.routes()) == one_by_one
    for part in OPENINGS:
        machine.side.change(drop=(part,), put=())
    assert (held(machine), machine.routes()) == bare


def test_a_table_that_others_have_changed_is_made_anew(machine: Machine, tenant: TenantNetnsDriver) -> None:
    machine.join(tenant, *OPENINGS)
    whole = held(machine)
    machine.side.change(drop=(OPENINGS[3],), put=())
    for command in ("nft flush map inet weft_host node_ports4", "nft delete table inet weft_host"):
        machine.run(command)
        machine.side.change(drop=(), put=(OPENINGS[3],))
        machine.side.change(drop=(OPENINGS[4],), put=())
        machine.side.change(drop=(), put=(OPENINGS[4],))
        assert held(machine) == whole
        machine.side.change(drop=(OPENINGS[3],), put=())


def test_a_node_port_that_several_tenants_ask_for_is_the_first_ones(
    machine: Machine, tenant: TenantNetnsDriver
) -> None:
    red = TenantName("red")
    theirs = NodePortVip(red, (parse_address("172.19.255.2", field="door"),))
    machine.join(tenant, theirs, NodePort(red, TCP, 30080))
    assert "172.19.255.2" in str(held(machine)["node_ports4"])
    machine.side.change(drop=(), put=(DOOR, NodePort(BLUE, TCP, 30080)))
    assert "172.19.255.1" in str(held(machine)["node_ports4"])
    machine.side.change(drop=(NodePort(BLUE, TCP, 30080),), put=())
    assert "172.19.255.2" in str(held(machine)["node_ports4"])


def test_a_port_that_several_services_ask_for_leads_to_one_of_them(machine: Machine, tenant: TenantNetnsDriver) -> None:
    """Two services may say the same external address: the table must stand all the same."""
    outer = parse_address("198.51.100.7", field="outer")
    ports = [HostPort(BLUE, 4, TCP, 80, DOOR.addresses[0], number, outer) for number in (30080, 30081)]
    machine.join(tenant, *ports)
    machine.side.change(drop=(), put=(HostPort(BLUE, 4, TCP, 80, DOOR.addresses[0], 30079, outer),))
    (one,) = held(machine)["ports_at4"]
    assert "30079" in one
    machine.side.change(drop=(HostPort(BLUE, 4, TCP, 80, DOOR.addresses[0], 30079, outer),), put=())
    (one,) = held(machine)["ports_at4"]
    assert "30080" in one
