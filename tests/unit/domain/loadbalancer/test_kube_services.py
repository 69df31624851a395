"""Kubernetes' services as their documents come and go, in any order."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.domain.addresses import Address, Range, parse_address
from weft.domain.host_access.state import ExternalAddress, HostPort, NodePort
from weft.domain.ids import NodeName, TenantName
from weft.domain.loadbalancer.external_ips import OuterRules
from weft.domain.loadbalancer.kube_objects import DeclaredService, EndpointSlice, KubeService, KubeSlice
from weft.domain.loadbalancer.kube_services import KubeServices, KubeView, ServiceKey, Surroundings
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.policy.model.protocols import TCP

BLUE = TenantName("blue")
KEY = ServiceKey("prod", "shop")
VIP, OUTER, DOOR = (parse_address(text, field="address") for text in ("10.96.0.10", "198.51.100.7", "172.19.255.1"))
ALLOWED = OuterRules(allowed=(Range(4, OUTER.number, OUTER.number),))


def service(*, shared: bool = False, **spec: Any) -> KubeService:
    ports = [{"name": "web", "port": 80, "nodePort": 30080}]
    members = {"spec": {"clusterIPs": [str(VIP)], "ports": ports, **spec}}
    return KubeService(
        tenant=BLUE,
        namespace=KEY.namespace,
        name=KEY.name,
        shared=shared,
        service=msgspec.convert(members, DeclaredService),
    )


def piece(address: str, name: str = "shop-1", *, port: int = 8080) -> KubeSlice:
    members = {
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "nodeName": "one"}],
        "ports": [{"name": "web", "port": port}],
    }
    return KubeSlice(
        tenant=BLUE,
        namespace=KEY.namespace,
        service_name=KEY.name,
        name=name,
        slice=msgspec.convert(members, EndpointSlice),
    )


def services(rules: OuterRules = ALLOWED, own: tuple[Address, ...] = (VIP,)) -> KubeServices:
    return KubeServices(node=NodeName("one"), surroundings=Surroundings(rules, (DOOR,)), own=own)


def view(kept: KubeServices) -> KubeView:
    ((key, found),) = kept.take()
    assert key == KEY
    assert found is not None
    return found


def backends(found: KubeView, front: FrontendKey) -> list[str]:
    return [str(target.address) for target in found.pools[front].targets]


def test_a_slice_may_come_before_its_service_and_stay_after_it() -> None:
    kept = services()
    kept.put_slice(piece("10.1.0.1"))
    assert list(kept.take()) == [(KEY, None)]
    kept.put_service(service())
    assert backends(view(kept), FrontendKey(VIP, TCP, 80)) == ["10.1.0.1"]
    kept.remove_service(KEY)
    assert list(kept.take()) == [(KEY, None)]
    assert not kept
    kept.remove_slice(KEY, "shop-1")
    kept.put_service(service())
    assert backends(view(kept), FrontendKey(VIP, TCP, 80)) == []


def test_slices_add_up() -> None:
    kept = services()
    kept.put_service(service())
    kept.put_slice(piece("10.1.0.2", "shop-2"))
    kept.put_slice(piece("10.1.0.1"))
    assert backends(view(kept), FrontendKey(DOOR, TCP, 30080)) == ["10.1.0.1", "10.1.0.2"]
    kept.remove_slice(KEY, "shop-2")
    assert backends(view(kept), FrontendKey(VIP, TCP, 80)) == ["10.1.0.1"]
    assert list(kept.take()) == []


def test_what_the_host_opens() -> None:
    kept = services()
    kept.put_service(service(externalIPs=[str(OUTER)]))
    ports = {NodePort(BLUE, TCP, 30080)}
    own = {HostPort(BLUE, 4, TCP, 80, DOOR, 30080, OUTER)}
    assert (
        view(kept).openings == {ExternalAddress(BLUE, VIP, "host"), ExternalAddress(BLUE, OUTER, "world")} | ports | own
    )
    kept.put_service(service(externalIPs=[str(OUTER)], ports=[{"port": 80}]))
    assert HostPort(BLUE, 4, TCP, 80, VIP, 80, OUTER) in view(kept).openings
    kept.put_service(service(shared=True))
    assert view(kept).openings == {ExternalAddress(BLUE, VIP, "tenants")} | ports


def test_a_load_balancer_may_be_asked_from_some_sources_only() -> None:
    """loadBalancerSourceRanges. Ranges of the other family only let nobody in, and not everybody (CVE-2025-64715)."""
    kept = services()
    for ranges, sources in (
        ([], None),
        (["192.0.2.0/24", "2001:db8::/32"], (Range(4, 0xC0000200, 0xC00002FF),)),
        (["2001:db8::/32"], ()),
    ):
        document = service(loadBalancerSourceRanges=ranges)
        given = {"spec": document.service.spec, "status": {"loadBalancer": {"ingress": [{"ip": str(OUTER)}]}}}
        parsed = msgspec.convert(msgspec.to_builtins(given), DeclaredService)
        kept.put_service(msgspec.structs.replace(document, service=parsed))
        assert ExternalAddress(BLUE, OUTER, "world", sources) in view(kept).openings
        kept.put_service(service(externalIPs=[str(OUTER)], loadBalancerSourceRanges=ranges))
        assert ExternalAddress(BLUE, OUTER, "world") in view(kept).openings, "not what nobody has given"
    kept.put_service(service(externalIPs=[str(OUTER)], loadBalancerSourceRanges=["everywhere"]))
    assert view(kept).faults == ("'everywhere' is not of the form address/length",)


def test_cve_2020_8554_an_address_outside_the_ranges_has_no_effect_and_says_so() -> None:
    kept = services(OuterRules())
    kept.put_service(service(externalIPs=[str(OUTER)]))
    found = view(kept)
    assert {front.address for front in found.pools} == {VIP, DOOR}
    assert ExternalAddress(BLUE, OUTER, "world") not in found.openings
    assert found.faults == (f"external address {OUTER} is not in externalRanges of the tenant",)
    kept.surround(Surroundings(ALLOWED, (DOOR,)))
    assert not view(kept).faults
    kept.surround(Surroundings(ALLOWED, (DOOR,)))
    assert list(kept.take()) == []


def test_cve_2020_8554_no_service_has_the_address_of_another_one() -> None:
    kept = services(own=(VIP, OUTER))
    kept.put_service(service(externalIPs=[str(OUTER)]))
    assert view(kept).faults == (f"external address {OUTER} is that of a service of the cluster",)


def test_what_cannot_be_read_has_no_effect_and_says_so() -> None:
    kept = services()
    kept.put_service(service(clusterIPs=["10.96.0.300"]))
    assert view(kept) == KubeView(faults=("spec.clusterIPs '10.96.0.300' is not an address",))
    kept.put_service(service(ports=[{"port": 70000}]))
    assert view(kept) == KubeView(faults=("spec.ports.port 70000 must be 1 to 65535",))


def test_a_slice_that_is_not_for_balancing_has_no_backends() -> None:
    kept = services()
    kept.put_service(service())
    kept.put_slice(piece("10.1.0.1"))
    assert any(pool.targets for pool in view(kept).pools.values())
    kept.put_slice(msgspec.structs.replace(piece("10.1.0.1"), foreign=True))
    assert not any(pool.targets for pool in view(kept).pools.values())
