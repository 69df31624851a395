"""What the tools for a person on call see of the kernel."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weft.adapters.netns.diagnostics import foreign_drops, probe_kernel, probe_macvlan, survey_space
from weft.adapters.netns.tenant_netns import TenantNetnsDriver
from weft.ctl.weft import mtu_probe
from weft.domain.addresses import parse_address
from weft.domain.errors import NotFound
from weft.domain.ids import TenantName
from weft.drivers import datapath_tools
from weft.kernel.netlink.link import LOOPBACK, Device, alter_link, create_veth, read_link
from weft.kernel.netlink.route import LinkAddress, Prefix, put_address
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.lab.namespaces import MS_BIND, mount, unmount
from weft.lab.servers.processes import DEADLINE

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns

BLUE = TenantName("blue")


def test_a_space_that_is_well_has_no_faults(directory: NamespaceDirectory) -> None:
    with TenantNetnsDriver(directory.create("blue")) as space:
        space.prepare()
        found = survey_space(BLUE, space)
    assert (found.tenant, found.ports, found.devices, found.faults) == ("blue", (), (), ())


def test_what_someone_has_broken_is_named(directory: NamespaceDirectory, there: TenantNetns) -> None:
    with TenantNetnsDriver(directory.create("blue")) as space:
        space.prepare()
        pair = create_veth(Device(name="wp1"), Device(name="eth0"), peer_namespace=there.namespace.fd)
        space.netlink.send_batch([pair])
        space.namespace.write_sysctls({"net/ipv4/ip_forward": "0"})
        space.nftables.run("delete table inet weft")
        found = survey_space(BLUE, space)
    assert found.ports == ("wp1",)
    assert found.faults == (
        "net/ipv4/ip_forward is 0, not 1",
        "device wp1 is down",
        "the table inet weft is missing: workloads may speak for others",
    )


def test_this_kernel_does_what_we_need_and_nothing_is_left(here: TenantNetns) -> None:
    before = here.ask("ip", "-j", "link")
    assert probe_kernel() + probe_macvlan() == []
    assert here.ask("ip", "-j", "link") == before


def test_a_machine_without_names_of_protocols_is_told_what_to_install(here: TenantNetns) -> None:
    """Else nftables takes no rule of ours, in words that lead nowhere."""
    mount(Path("/dev/null"), Path("/etc/protocols"), flags=MS_BIND)
    try:
        (lacking,) = probe_kernel()
    finally:
        unmount(Path("/etc/protocols"))
    assert "install netbase" in lacking


def test_a_chain_that_drops_by_default_is_named(here: TenantNetns) -> None:
    assert foreign_drops() == []
    ruleset = "table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }"
    subprocess.run(["nft", ruleset], check=True, timeout=DEADLINE)
    assert foreign_drops() == ["chain FORWARD of table ip filter drops what it does not know"]


def test_a_thread_moves_into_a_tenants_space_or_is_told_that_there_is_none(directory: NamespaceDirectory) -> None:
    tools = datapath_tools("linux")
    with directory.create("blue") as blue, Namespace.new() as elsewhere:

        def enter() -> object:
            tools.enter(directory.path, BLUE)
            with Namespace.current() as now:
                return now.identity

        assert elsewhere.run(enter) == blue.identity
        with pytest.raises(NotFound):
            elsewhere.run(lambda: tools.enter(Path(directory.path), TenantName("red")))


@pytest.mark.parametrize(("own", "other", "length"), [("192.0.2.1", "192.0.2.2", 24), ("fd00::1", "fd00::2", 64)])
def test_a_full_packet_is_answered_and_one_too_large_never_leaves(
    here: TenantNetns, there: TenantNetns, own: str, other: str, length: int
) -> None:
    here.send(create_veth(Device(name="a", mtu=1400), Device(name="b", mtu=1400), peer_namespace=there.namespace.fd))
    for space, name, text in ((here, "a", own), (there, "b", other)):
        space.namespace.write_sysctls({f"net/ipv6/conf/{name}/accept_dad": "0"})
        link = read_link(space.route, name)
        assert link is not None
        prefix = Prefix(parse_address(text, field="address"), length)
        space.send(alter_link(LOOPBACK, up=True), alter_link(link.index, up=True))
        space.send(put_address(LinkAddress(link=link.index, prefix=prefix)))
    assert mtu_probe.answers(other, size=1400, source=own, within=DEADLINE)
    with pytest.raises(OSError, match="too long"):
        mtu_probe.answers(other, size=1401, source=own, within=1)
    there.send(alter_link(LOOPBACK, up=True))
    assert not mtu_probe.answers(f"{other}9", size=100, source=own, within=0.2)
