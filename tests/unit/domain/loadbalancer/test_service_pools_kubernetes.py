"""Kubernetes Services and slices of a tenant, added and removed in any order."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.domain.addresses import Address, Range, parse_address
from weft.domain.host_access.state import ExternalAddress, HostPort, NodePort
from weft.domain.ids import NodeName, TenantName
from weft.domain.loadbalancer.external_ips import ExternalIpPolicy
from weft.domain.loadbalancer.kube_objects import EndpointSlice, KubeService, KubeSlice, ServiceObject
from weft.domain.loadbalancer.service_pools import CompiledService, KubeServices, ServiceContext, ServiceKey
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.policy.model.protocols import TCP

BLUE = TenantName("blue")
KEY = ServiceKey("prod", "shop")
VIP, EXTERNAL_IP, NODEPORT_VIP = (
    parse_address(text, field="address") for text in ("10.96.0.10", "198.51.100.7", "172.19.255.1")
)
ALLOWED = ExternalIpPolicy(allowed=(Range(4, EXTERNAL_IP.number, EXTERNAL_IP.number),))


def service(*, shared: bool = False, **spec: Any) -> KubeService:
    ports = [{"name": "web", "port": 80, "nodePort": 30080}]
    members = {"spec": {"clusterIPs": [str(VIP)], "ports": ports, **spec}}
    return KubeService(
        tenant=BLUE,
        namespace=KEY.namespace,
        name=KEY.name,
        shared=shared,
        service=msgspec.convert(members, ServiceObject),
    )


def slice_of(address: str, name: str = "shop-1", *, port: int = 8080) -> KubeSlice:
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


def services(policy: ExternalIpPolicy = ALLOWED, cluster_ips: tuple[Address, ...] = (VIP,)) -> KubeServices:
    return KubeServices(node=NodeName("one"), context=ServiceContext(policy, (NODEPORT_VIP,)), cluster_ips=cluster_ips)


def compiled(kube_services: KubeServices) -> CompiledService:
    ((key, found),) = kube_services.take_changes()
    assert key == KEY
    assert found is not None
    return found


def backends(found: CompiledService, frontend: FrontendKey) -> list[str]:
    return [str(target.address) for target in found.pools[frontend].targets]


def test_a_slice_may_arrive_before_its_service_and_outlive_it() -> None:
    kube_services = services()
    kube_services.put_slice(slice_of("10.1.0.1"))
    assert list(kube_services.take_changes()) == [(KEY, None)]
    kube_services.put_service(service())
    assert backends(compiled(kube_services), FrontendKey(VIP, TCP, 80)) == ["10.1.0.1"]
    kube_services.remove_service(KEY)
    assert list(kube_services.take_changes()) == [(KEY, None)]
    assert not kube_services
    kube_services.remove_slice(KEY, "shop-1")
    kube_services.put_service(service())
    assert backends(compiled(kube_services), FrontendKey(VIP, TCP, 80)) == []


def test_backends_of_all_slices_are_merged() -> None:
    kube_services = services()
    kube_services.put_service(service())
    kube_services.put_slice(slice_of("10.1.0.2", "shop-2"))
    kube_services.put_slice(slice_of("10.1.0.1"))
    assert backends(compiled(kube_services), FrontendKey(NODEPORT_VIP, TCP, 30080)) == ["10.1.0.1", "10.1.0.2"]
    kube_services.remove_slice(KEY, "shop-2")
    assert backends(compiled(kube_services), FrontendKey(VIP, TCP, 80)) == ["10.1.0.1"]
    assert list(kube_services.take_changes()) == []


def test_host_access_of_a_service() -> None:
    kube_services = services()
    kube_services.put_service(service(externalIPs=[str(EXTERNAL_IP)]))
    ports = {NodePort(BLUE, TCP, 30080)}
    host_ports = {HostPort(BLUE, 4, TCP, 80, NODEPORT_VIP, 30080, EXTERNAL_IP)}
    assert (
        compiled(kube_services).host_items
        == {ExternalAddress(BLUE, VIP, "host"), ExternalAddress(BLUE, EXTERNAL_IP, "world")} | ports | host_ports
    )
    kube_services.put_service(service(externalIPs=[str(EXTERNAL_IP)], ports=[{"port": 80}]))
    assert HostPort(BLUE, 4, TCP, 80, VIP, 80, EXTERNAL_IP) in compiled(kube_services).host_items
    kube_services.put_service(service(shared=True))
    assert compiled(kube_services).host_items == {ExternalAddress(BLUE, VIP, "tenants")} | ports


def test_load_balancer_source_ranges_restrict_the_sources() -> None:
    """Ranges of the other family alone allow no source, rather than any (CVE-2025-64715)."""
    kube_services = services()
    for ranges, sources in (
        ([], None),
        (["192.0.2.0/24", "2001:db8::/32"], (Range(4, 0xC0000200, 0xC00002FF),)),
        (["2001:db8::/32"], ()),
    ):
        document = service(loadBalancerSourceRanges=ranges)
        document_json = {
            "spec": document.service.spec,
            "status": {"loadBalancer": {"ingress": [{"ip": str(EXTERNAL_IP)}]}},
        }
        parsed = msgspec.convert(msgspec.to_builtins(document_json), ServiceObject)
        kube_services.put_service(msgspec.structs.replace(document, service=parsed))
        found = compiled(kube_services).pools
        assert found[FrontendKey(EXTERNAL_IP, TCP, 80)].sources == sources
        assert found[FrontendKey(VIP, TCP, 80)].sources is None
        kube_services.put_service(service(externalIPs=[str(EXTERNAL_IP)], loadBalancerSourceRanges=ranges))
        assert compiled(kube_services).pools[FrontendKey(EXTERNAL_IP, TCP, 80)].sources is None, (
            "the ranges apply to load balancer IPs only"
        )
    kube_services.put_service(service(externalIPs=[str(EXTERNAL_IP)], loadBalancerSourceRanges=["everywhere"]))
    assert compiled(kube_services).faults == ("'everywhere' is not of the form address/length",)


def test_cve_2020_8554_an_external_ip_outside_the_ranges_is_ignored_with_a_fault() -> None:
    kube_services = services(ExternalIpPolicy())
    kube_services.put_service(service(externalIPs=[str(EXTERNAL_IP)]))
    found = compiled(kube_services)
    assert {frontend.address for frontend in found.pools} == {VIP, NODEPORT_VIP}
    assert ExternalAddress(BLUE, EXTERNAL_IP, "world") not in found.host_items
    assert found.faults == (f"external address {EXTERNAL_IP} is not in externalRanges of the tenant",)
    kube_services.set_context(ServiceContext(ALLOWED, (NODEPORT_VIP,)))
    assert not compiled(kube_services).faults
    kube_services.set_context(ServiceContext(ALLOWED, (NODEPORT_VIP,)))
    assert list(kube_services.take_changes()) == []


def test_cve_2020_8554_no_service_takes_the_cluster_ip_of_another_one() -> None:
    kube_services = services(cluster_ips=(VIP, EXTERNAL_IP))
    kube_services.put_service(service(externalIPs=[str(EXTERNAL_IP)]))
    assert compiled(kube_services).faults == (f"external address {EXTERNAL_IP} is the cluster IP of a service",)


def test_an_invalid_service_is_ignored_with_a_fault() -> None:
    kube_services = services()
    kube_services.put_service(service(clusterIPs=["10.96.0.300"]))
    assert compiled(kube_services) == CompiledService(faults=("spec.clusterIPs '10.96.0.300' is not an address",))
    kube_services.put_service(service(ports=[{"port": 70000}]))
    assert compiled(kube_services) == CompiledService(faults=("spec.ports.port 70000 must be 1 to 65535",))


def test_a_slice_of_another_service_proxy_has_no_backends() -> None:
    kube_services = services()
    kube_services.put_service(service())
    kube_services.put_slice(slice_of("10.1.0.1"))
    assert any(pool.targets for pool in compiled(kube_services).pools.values())
    kube_services.put_slice(msgspec.structs.replace(slice_of("10.1.0.1"), foreign=True))
    assert not any(pool.targets for pool in compiled(kube_services).pools.values())
