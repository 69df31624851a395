"""The host's side of host access: what is made in a namespace where most things are others', and what is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weft.adapters.linux.host_side import HostSide, host_link_name
from weft.adapters.linux.netns import NamespaceDirectory
from weft.adapters.linux.space import TenantSpace
from weft.adapters.linux.survey import foreign_drops
from weft.domain.addresses import Address, parse_address, parse_subnet_v4
from weft.domain.hosting.parts import Ground, HostLink, HostPort
from weft.domain.ids import TenantName
from weft.domain.nodeview import Part
from weft.domain.policy.protocols import TCP

if TYPE_CHECKING:
    from tests.lab.conftest import Space

BLUE = TenantName("blue")
OWN = parse_address("192.0.2.1", field="own")
LINK = HostLink(BLUE, (OWN, Address(6, 0xFD << 120 | OWN.number)))
GROUND = Ground(BLUE, parse_subnet_v4("10.1.0.0/16"), routed=True)
PORT = HostPort(BLUE, 4, TCP, 8080, parse_address("10.1.0.5", field="pod"), 80)
NAME = host_link_name(BLUE)


@pytest.fixture
def tenant(directory: NamespaceDirectory) -> Iterator[TenantSpace]:
    with TenantSpace(directory.create("blue")) as space:
        space.prepare()
        yield space


class Machine:
    """The host's namespace as the usual tools see it, and our side of it."""

    def __init__(self, here: Space, side: HostSide) -> None:
        self.here = here
        self.side = side

    def run(self, command: str) -> None:
        self.here.ask(*command.split())

    def join(self, tenant: TenantSpace, *parts: Part) -> None:
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
def machine(here: Space) -> Iterator[Machine]:
    here.namespace.write_sysctls({"net/ipv6/conf/default/accept_ra": "1", "net/ipv6/conf/lo/accept_ra": "0"})
    with ExitStack() as closing:
        side = HostSide(here.namespace, here.route, vxlan_port=4789, unmasked=())
        closing.callback(side.close)
        machine = Machine(here, side)
        machine.run("ip link add name eth0 type bridge")
        machine.run("ip addr add 192.0.2.1/24 dev eth0")
        machine.run("ip link set eth0 up")
        yield machine


def test_a_tenant_comes_and_goes(machine: Machine, tenant: TenantSpace) -> None:
    before = machine.devices(), machine.routes(), machine.tables()
    machine.join(tenant, GROUND, PORT)
    assert machine.routes()["10.1.0.0/16"] == NAME
    assert machine.tables() == {"weft_host"}
    machine.side.change(drop=(LINK, GROUND, PORT), put=())
    machine.side.drop_link(BLUE)
    assert (machine.devices(), machine.routes(), machine.tables()) == before


def test_a_link_is_made_once_and_again_for_a_new_space(
    machine: Machine, tenant: TenantSpace, directory: NamespaceDirectory
) -> None:
    assert machine.side.put_link(LINK, tenant, mtu=1400)
    assert not machine.side.put_link(LINK, tenant, mtu=1400)
    with TenantSpace(directory.create("new")) as other:
        other.prepare()
        assert machine.side.put_link(LINK, other, mtu=1400)


def test_a_route_of_the_host_itself_is_better_than_ours(machine: Machine, tenant: TenantSpace) -> None:
    machine.run("ip route add 10.1.0.0/16 dev eth0")
    machine.join(tenant, GROUND)
    used = machine.here.ask("ip", "-j", "route", "get", "10.1.0.5")[0]["dev"]
    machine.side.change(drop=(LINK, GROUND), put=())
    assert (used, machine.routes()["10.1.0.0/16"]) == ("eth0", "eth0")


def test_the_host_forwards_and_still_hears_its_routers(machine: Machine, tenant: TenantSpace) -> None:
    """A host that forwards ignores routers unless it is told twice: it would lose its way out."""
    machine.join(tenant)
    settings = ("ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv6/conf/eth0/accept_ra", "ipv6/conf/lo/accept_ra")
    read = machine.here.namespace.run(lambda: [Path("/proc/sys/net", name).read_text().strip() for name in settings])
    assert read == ["1", "1", "2", "0"]


def test_a_firewall_of_others_is_passed_by_a_marked_rule(machine: Machine, tenant: TenantSpace) -> None:
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


def test_what_is_nobodys_is_removed(machine: Machine, tenant: TenantSpace) -> None:
    machine.join(tenant, GROUND)
    assert machine.side.converge(set()) == [f"host: removed device {NAME}"]
    assert "10.1.0.0/16" not in machine.routes()
    assert machine.tables() == set()
