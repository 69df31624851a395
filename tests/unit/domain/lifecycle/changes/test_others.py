"""Tenants, profiles, services, Bgp peers and the cluster's settings (O1, O7–O11, O19, O21, W16)."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fake_cluster import DEFAULT, FakeCluster, group, network, policy, profile, service

from weft.domain import kinds, model
from weft.domain.errors import Conflict, Invalid, NotFound
from weft.domain.ids import NodeName, TenantName
from weft.domain.lifecycle import changes

T1 = TenantName("t1")
PEER = model.BgpPeer(hostname=NodeName("n1"), router_ip="50.1.1.2/24", as_number="65002", neighbor_as="500")


class TestTenants:
    @pytest.mark.parametrize(
        "member",
        [network(tenant=T1), policy(tenant=T1), profile(tenant=T1)],
        ids=lambda member: type(member).__name__,
    )
    def test_a_tenant_stays_while_anything_is_in_it(self, member: model.Value) -> None:
        """O1."""
        world = FakeCluster()
        world.put(model.Tenant(name=T1))
        world.put(member)
        with world.refuses(Conflict):
            world.delete(model.Tenant(name=T1))
        world.delete(member)
        world.delete(model.Tenant(name=T1))
        assert world.entries.keys() == {"tenants/default"}

    def test_w16_the_default_tenant_stays(self) -> None:
        world = FakeCluster()
        with world.refuses(Conflict):
            world.delete(model.Tenant(name=DEFAULT))

    def test_what_does_not_exist_cannot_go(self) -> None:
        world = FakeCluster()
        with world.refuses(NotFound):
            world.delete(model.Tenant(name=T1))


class TestProfiles:
    def test_o19_a_profile_in_use_stays(self) -> None:
        world = FakeCluster()
        world.put(network())
        world.put(profile())
        world.put(group(net_profile="gold"))
        assert world.put(profile(bandwidth="4G")).bandwidth == "4G"
        with world.refuses(Conflict):
            world.delete(profile())
        world.put(group())
        world.delete(profile())

    def test_the_tenant_must_exist(self) -> None:
        world = FakeCluster()
        for value in (profile(tenant=T1), policy(tenant=T1)):
            with world.refuses(Invalid, field="tenantName"):
                world.put(value)


class TestServices:
    @pytest.fixture
    def world(self) -> FakeCluster:
        world = FakeCluster()
        world.put(network())
        return world

    def test_the_address_stays_until_the_service_goes(self, world: FakeCluster) -> None:
        before = dict(world.entries)
        assert world.put(service()).vip == "10.1.1.1"
        assert world.put(service(ports=("81:81:TCP",))).vip == "10.1.1.1"
        assert world.attach("e1").ip_address == "10.1.1.2"
        assert world.put(service(ip_address="10.1.1.9")).vip == "10.1.1.9"
        assert world.put(service()).vip == "10.1.1.9"
        world.detach("e1")
        world.delete(service())
        assert world.entries == before

    def test_a_service_of_a_dual_stack_network_has_an_address_of_each_family(self) -> None:
        """Each is kept by itself, and freed with the service; one that came before the second family is given it."""
        world = FakeCluster()
        world.put(network(ipv6_subnet="fd00::/120", ipv6_gateway="fd00::1"))
        before = dict(world.entries)
        assert _vips(world.put(service())) == ("10.1.1.1", "fd00::2")
        assert world.attach("e1").ipv6_address == "fd00::3"
        assert _vips(world.put(service(ports=("81:81:TCP",)))) == ("10.1.1.1", "fd00::2")
        assert _vips(world.put(service(ipv6_address="FD00:0:0::09"))) == ("10.1.1.1", "fd00::9")
        assert _vips(world.put(service(ip_address="10.1.1.9"))) == ("10.1.1.9", "fd00::9")
        assert _vips(world.put(service("other"))) == ("10.1.1.1", "fd00::2")
        world.detach("e1")
        world.delete(service())
        world.delete(service("other"))
        assert world.entries == before

    def test_an_ipv6_address_is_refused_when_taken_or_not_ours(self, world: FakeCluster) -> None:
        with world.refuses(Invalid, field="ipv6Address"):
            world.put(service(ipv6_address="fd00::9"))
        world.put(network("dual", "10.2.0.0/24", ipv6_subnet="fd00::/120", ipv6_gateway="fd00::1"))
        world.put(service("first", network="dual", ipv6_address="fd00::9"))
        with world.refuses(Conflict, field="ipv6Address"):
            world.put(service(network="dual", ipv6_address="fd00::9"))
        for odd in ("fd00::1", "fd01::9", "10.2.0.9", "::ffff", "fd00::9%lo", "nine"):
            with world.refuses(Invalid, field="ipv6Address"):
                world.put(service(network="dual", ipv6_address=odd))

    def test_an_address_is_refused_when_taken_or_not_ours(self, world: FakeCluster) -> None:
        world.attach("e1", address="10.1.1.9")
        world.put(group(ip_pool="10.1.1.20"))
        with world.refuses(Conflict, field="ipAddress"):
            world.put(service(ip_address="10.1.1.9"))
        for odd in ("10.1.1.0", "10.2.0.1", "10.1.1.20"):
            with world.refuses(Invalid, field="ipAddress"):
                world.put(service(ip_address=odd))

    def test_the_network_never_changes(self, world: FakeCluster) -> None:
        world.put(network("red", "10.2.0.0/24"))
        world.put(service())
        with world.refuses(Conflict, field="networkName"):
            world.put(service(network="red"))
        with world.refuses(Invalid, field="networkName"):
            world.put(service("other", network="none"))


def _vips(service: model.Service) -> tuple[str, str]:
    return service.vip, service.ipv6_vip


class TestBgp:
    def test_o21_a_peer_is_overwritten_only_by_another(self) -> None:
        world = FakeCluster()
        world.put(PEER)
        assert changes.plan_put(world.reading(), kinds.BGP, PEER).writes == ()
        changed = model.BgpPeer(hostname=PEER.hostname, router_ip="60.1.1.2/24", as_number="1", neighbor_as="2")
        assert world.put(changed) == changed
        world.delete(changed)
        assert list(world.cluster.all(kinds.BGP)) == []


class TestGlobals:
    @pytest.fixture
    def world(self) -> FakeCluster:
        world = FakeCluster()
        world.put(model.Global(fwd_mode="routing"))
        return world

    @pytest.mark.parametrize("encap", ["vlan", "vxlan"])
    def test_o7_o8_ranges_cover_the_tags_in_use(self, world: FakeCluster, encap: str) -> None:
        member = f"{encap}s"
        present = world.cluster.global_settings()
        world.put(network(encap=encap, pkt_tag=60))
        for text in ("1-59", "61-100"):
            with world.refuses(Conflict, field=member):
                world.put(msgspec.structs.replace(present, **{member: text}))
        world.put(msgspec.structs.replace(present, **{member: "60-60"}))

    def test_o9_o10_modes_change_only_without_networks(self, world: FakeCluster) -> None:
        world.put(network())
        with world.refuses(Conflict, field="fwdMode"):
            world.put(model.Global(fwd_mode="bridge"))
        with world.refuses(Conflict, field="pvtSubnet"):
            world.put(model.Global(fwd_mode="routing", pvt_subnet="172.20.0.0/16"))
        assert world.put(model.Global(fwd_mode="routing", arp_mode="flood")).arp_mode == "flood"
        world.delete(network())
        world.put(model.Global(fwd_mode="bridge", pvt_subnet="172.20.0.0/16"))

    def test_o9_routing_stays_while_there_are_peers(self, world: FakeCluster) -> None:
        world.put(PEER)
        with world.refuses(Conflict, field="fwdMode"):
            world.put(model.Global(fwd_mode="bridge"))

    def test_deleting_them_puts_the_defaults_back_where_they_may_change(self, world: FakeCluster) -> None:
        world.put(model.Global(fwd_mode="routing", vlans="50-100", arp_mode="flood"))
        world.put(network(encap="vlan"))
        world.delete(model.Global())
        assert world.cluster.global_settings() == model.Global(fwd_mode="routing")
