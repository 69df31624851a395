"""The kernel checks of `weft doctor`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weft.adapters.netns.diagnostics import foreign_drops, probe_kernel, probe_macvlan, survey_tenant_netns
from weft.adapters.netns.tenant_netns import TenantNetnsDriver
from weft.ctl.weft import mtu_probe
from weft.domain.addresses import parse_address
from weft.domain.errors import NotFound
from weft.domain.ids import TenantName
from weft.drivers import datapath_tools
from weft.kernel.netlink.link import LOOPBACK_IFINDEX, Device, change_link, create_veth, read_link
from weft.kernel.netlink.route import LinkAddress, Prefix, put_address
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.lab.namespaces import MS_BIND, mount, unmount
from weft.lab.servers.processes import DEADLINE

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns

BLUE = TenantName("blue")


def test_a_healthy_netns_has_no_faults(directory: NamespaceDirectory) -> None:
    with TenantNetnsDriver(directory.create("blue")) as netns:
        netns.prepare()
        found = survey_tenant_netns(BLUE, netns)
    assert (found.tenant, found.ports, found.devices, found.faults) == ("blue", (), (), ())


def test_faults_are_described(directory: NamespaceDirectory, there: TenantNetns) -> None:
    with TenantNetnsDriver(directory.create("blue")) as netns:
        netns.prepare()
        pair = create_veth(Device(name="wp1"), Device(name="eth0"), peer_namespace=there.namespace.fd)
        netns.netlink.send_batch([pair])
        netns.namespace.write_sysctls({"net/ipv4/ip_forward": "0"})
        netns.nftables.run("delete table inet weft")
        found = survey_tenant_netns(BLUE, netns)
    assert found.ports == ("wp1",)
    assert found.faults == (
        "net/ipv4/ip_forward is 0, not 1",
        "device wp1 is down",
        "the table inet weft is missing: no anti-spoofing, no policy",
    )


def test_this_kernel_passes_the_probe_and_nothing_is_left(here: TenantNetns) -> None:
    before = here.ask("ip", "-j", "link")
    assert probe_kernel() + probe_macvlan() == []
    assert here.ask("ip", "-j", "link") == before


def test_missing_protocol_names_are_reported_with_the_package(here: TenantNetns) -> None:
    """Without them nftables rejects our rules with a misleading error."""
    mount(Path("/dev/null"), Path("/etc/protocols"), flags=MS_BIND)
    try:
        (lacking,) = probe_kernel()
    finally:
        unmount(Path("/etc/protocols"))
    assert "install netbase" in lacking


def test_a_foreign_chain_that_drops_by_default_is_reported(here: TenantNetns) -> None:
    assert foreign_drops() == []
    ruleset = "table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }"
    subprocess.run(["nft", ruleset], check=True, timeout=DEADLINE)
    assert foreign_drops() == ["chain FORWARD of table ip filter drops by default"]


def test_a_thread_enters_a_tenant_netns_or_fails(directory: NamespaceDirectory) -> None:
    tools = datapath_tools("linux")
    with directory.create("blue") as blue, Namespace.new() as elsewhere:

        def enter() -> object:
            tools.enter_tenant_netns(directory.path, BLUE)
            with Namespace.current() as now:
                return now.identity

        assert elsewhere.run(enter) == blue.identity
        with pytest.raises(NotFound):
            elsewhere.run(lambda: tools.enter_tenant_netns(Path(directory.path), TenantName("red")))


@pytest.mark.parametrize(("own", "other", "length"), [("192.0.2.1", "192.0.2.2", 24), ("fd00::1", "fd00::2", 64)])
def test_mtu_probe_answers_full_packets_and_rejects_larger_ones(
    here: TenantNetns, there: TenantNetns, own: str, other: str, length: int
) -> None:
    here.send(create_veth(Device(name="a", mtu=1400), Device(name="b", mtu=1400), peer_namespace=there.namespace.fd))
    for netns, name, text in ((here, "a", own), (there, "b", other)):
        netns.namespace.write_sysctls({f"net/ipv6/conf/{name}/accept_dad": "0"})
        link = read_link(netns.route, name)
        assert link is not None
        prefix = Prefix(parse_address(text, field="address"), length)
        netns.send(change_link(LOOPBACK_IFINDEX, up=True), change_link(link.index, up=True))
        netns.send(put_address(LinkAddress(link=link.index, prefix=prefix)))
    assert mtu_probe.answers(other, size=1400, source=own, within=DEADLINE)
    with pytest.raises(OSError, match="too long"):
        mtu_probe.answers(other, size=1401, source=own, within=1)
    there.send(change_link(LOOPBACK_IFINDEX, up=True))
    assert not mtu_probe.answers(f"{other}9", size=100, source=own, within=0.2)
