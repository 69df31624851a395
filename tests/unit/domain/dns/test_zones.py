"""A tenant's zone: Kubernetes' services in the tenants they are in, shared ones in all, pods by their addresses."""

from __future__ import annotations

import msgspec
from tests.support.fake_cluster import FakeCluster, network

from weft.domain import kinds, model
from weft.domain.dns.names import NOTHING, Zone
from weft.domain.dns.zones import kube_entry, stored_kube_entry, tenant_zone
from weft.domain.ids import DEFAULT_TENANT, TenantName
from weft.domain.loadbalancer.kube_objects import (
    Conditions,
    DeclaredService,
    EndpointSlice,
    KubeService,
    KubeSlice,
    ServicePort,
    ServiceSpec,
    SliceEndpoint,
    SlicePort,
)
from weft.domain.model import PodIdentity
from weft.domain.transaction import put

BLUE = TenantName("blue")
PORT = ServicePort(name="http", port=80)


def service(
    name: str = "web", *, tenant: TenantName = DEFAULT_TENANT, shared: bool = False, **spec: object
) -> KubeService:
    given = {"cluster_ips": ("10.96.0.9",), "ports": (PORT,)} | spec
    value = DeclaredService(spec=ServiceSpec(**given))  # type: ignore[arg-type]
    return KubeService(tenant=tenant, namespace="shop", name=name, shared=shared, service=value)


def piece(name: str, *endpoints: SliceEndpoint, family: str = "IPv4") -> KubeSlice:
    value = EndpointSlice(
        address_type=family,  # type: ignore[arg-type]
        endpoints=endpoints,
        ports=(SlicePort(name="http", port=8080),),
    )
    return KubeSlice(tenant=DEFAULT_TENANT, namespace="shop", service_name="web", name=name, slice=value)


def backend(address: str, *, ready: bool | None = True, hostname: str = "") -> SliceEndpoint:
    return SliceEndpoint(addresses=(address,), conditions=Conditions(ready=ready), hostname=hostname)


def world(*values: model.Value) -> FakeCluster:
    world = FakeCluster()
    world.put(model.Tenant(name=BLUE))
    for value in values:
        kind = next(kind for kind in kinds.ALL if kind.type is type(value))
        world.carry_out(world.reading().plan([put(kind, value)]))
    return world


def answers(zone: Zone) -> set[tuple[str, str, str]]:
    return {(record.name, record.type, record.data) for entry in zone.entries.values() for record in entry.records}


def test_services_resolve_in_their_own_tenant_and_shared_ones_in_all() -> None:
    both = world(service("web"), service("dns", shared=True, cluster_ips=("10.96.0.10",)), service("db", tenant=BLUE))
    own, blue = (
        {name for name, kind, _ in answers(tenant_zone(both.cluster, tenant)) if kind == "A"}
        for tenant in (DEFAULT_TENANT, BLUE)
    )
    assert own == {"web.shop.svc.cluster.local", "dns.shop.svc.cluster.local"}
    assert blue == {"db.shop.svc.cluster.local", "dns.shop.svc.cluster.local"}


def test_the_domain_is_a_setting() -> None:
    zone = tenant_zone(world(service()).cluster, DEFAULT_TENANT, domain="example.test")
    assert ("web.shop.svc.example.test", "A", "10.96.0.9") in answers(zone)
    assert ("_http._tcp.web.shop.svc.example.test", "SRV", "0 100 80 web.shop.svc.example.test") in answers(zone)


def test_a_headless_service_is_its_ready_backends() -> None:
    headless = service(cluster_ips=("None",))
    pieces = (
        piece(
            "web-1",
            backend("10.1.1.5", hostname="web-0"),
            backend("10.1.1.6", ready=False),
            backend("10.1.1.7", ready=None),
        ),
        piece("web-2", backend("2001:db8::5", hostname="web-0"), family="IPv6"),
        piece("web-3", backend("outside.example"), family="FQDN"),
    )
    zone = tenant_zone(world(headless, *pieces).cluster, DEFAULT_TENANT)
    name = "web.shop.svc.cluster.local"
    assert {data for owner, _, data in answers(zone) if owner == name} == {"10.1.1.5", "10.1.1.7", "2001:db8::5"}
    assert {data for owner, _, data in answers(zone) if owner == f"web-0.{name}"} == {"10.1.1.5", "2001:db8::5"}
    assert (f"_http._tcp.{name}", "SRV", f"0 100 8080 web-0.{name}") in answers(zone)


def test_another_name_for_something() -> None:
    entry = kube_entry(service(type="ExternalName", external_name="Example.COM.", cluster_ips=()), [])
    assert [(each.type, each.data) for each in entry.records] == [("CNAME", "example.com")]


def test_what_brings_nothing() -> None:
    for empty in (service(cluster_ips=()), service(cluster_ips=("x",)), service(type="ExternalName")):
        assert kube_entry(empty, []) == NOTHING


def test_one_service_alone_is_told_as_the_whole_zone_tells_it() -> None:
    both = world(service(cluster_ips=("None",)), piece("web-1", backend("10.1.1.5")))
    entry, is_shared = stored_kube_entry(both.cluster, DEFAULT_TENANT, "shop", "web")
    assert entry == tenant_zone(both.cluster, DEFAULT_TENANT).entries["kube:shop:web"]
    assert not is_shared
    assert stored_kube_entry(both.cluster, BLUE, "shop", "web") == (NOTHING, False)


def test_a_pod_is_known_by_its_address() -> None:
    town = world()
    town.put(network())
    made = town.attach("e1")
    pod = msgspec.structs.replace(made, pod=PodIdentity(namespace="shop", name="web-0"), container_name="shop/web-0")
    town.carry_out(town.reading().plan([put(kinds.ENDPOINT, pod)]))
    name = made.ip_address.replace(".", "-")
    found = answers(tenant_zone(town.cluster, DEFAULT_TENANT))
    assert (f"{name}.shop.pod.cluster.local", "A", made.ip_address) in found
    assert ("web-0", "A", made.ip_address) in found
