"""A tenant's zone: Kubernetes Services of the tenant, shared Services, and pods by address."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_cluster import FakeCluster, network

from weft.dns.encode import encode_name, encode_record
from weft.domain import kinds, model
from weft.domain.dns.names import EMPTY_ENTRY, Zone, service_entry
from weft.domain.dns.zones import kube_entry, stored_kube_entry, tenant_zone, workload_entry
from weft.domain.ids import DEFAULT_TENANT, EndpointId, NetworkName, ServiceName, TenantName
from weft.domain.loadbalancer.kube_objects import (
    Conditions,
    EndpointSlice,
    KubeService,
    KubeSlice,
    ServiceObject,
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
    fields = {"cluster_ips": ("10.96.0.9",), "ports": (PORT,)} | spec
    value = ServiceObject(spec=ServiceSpec(**fields))  # type: ignore[arg-type]
    return KubeService(tenant=tenant, namespace="shop", name=name, shared=shared, service=value)


def slice_of(name: str, *endpoints: SliceEndpoint, family: str = "IPv4") -> KubeSlice:
    value = EndpointSlice(
        address_type=family,  # type: ignore[arg-type]
        endpoints=endpoints,
        ports=(SlicePort(name="http", port=8080),),
    )
    return KubeSlice(tenant=DEFAULT_TENANT, namespace="shop", service_name="web", name=name, slice=value)


def backend(address: str, *, ready: bool | None = True, hostname: str = "") -> SliceEndpoint:
    return SliceEndpoint(addresses=(address,), conditions=Conditions(ready=ready), hostname=hostname)


def fake_cluster(*values: model.Value) -> FakeCluster:
    fake_cluster = FakeCluster()
    fake_cluster.put(model.Tenant(name=BLUE))
    for value in values:
        kind = next(kind for kind in kinds.ALL if kind.type is type(value))
        fake_cluster.carry_out(fake_cluster.reading().plan([put(kind, value)]))
    return fake_cluster


def records_of(zone: Zone) -> set[tuple[str, str, str]]:
    return {(record.name, record.type, record.data) for entry in zone.entries.values() for record in entry.records}


def test_services_resolve_in_their_own_tenant_and_shared_ones_in_all() -> None:
    both = fake_cluster(
        service("web"), service("dns", shared=True, cluster_ips=("10.96.0.10",)), service("db", tenant=BLUE)
    )
    own, blue = (
        {name for name, kind, _ in records_of(tenant_zone(both.cluster, tenant)) if kind == "A"}
        for tenant in (DEFAULT_TENANT, BLUE)
    )
    assert own == {"web.shop.svc.cluster.local", "dns.shop.svc.cluster.local"}
    assert blue == {"db.shop.svc.cluster.local", "dns.shop.svc.cluster.local"}


def test_the_domain_is_a_setting() -> None:
    zone = tenant_zone(fake_cluster(service()).cluster, DEFAULT_TENANT, domain="example.test")
    assert ("web.shop.svc.example.test", "A", "10.96.0.9") in records_of(zone)
    assert ("_http._tcp.web.shop.svc.example.test", "SRV", "0 100 80 web.shop.svc.example.test") in records_of(zone)


def test_a_headless_service_resolves_to_its_ready_backends() -> None:
    headless = service(cluster_ips=("None",))
    slices = (
        slice_of(
            "web-1",
            backend("10.1.1.5", hostname="web-0"),
            backend("10.1.1.6", ready=False),
            backend("10.1.1.7", ready=None),
        ),
        slice_of("web-2", backend("2001:db8::5", hostname="web-0"), family="IPv6"),
        slice_of("web-3", backend("outside.example"), family="FQDN"),
    )
    zone = tenant_zone(fake_cluster(headless, *slices).cluster, DEFAULT_TENANT)
    name = "web.shop.svc.cluster.local"
    assert {data for owner, _, data in records_of(zone) if owner == name} == {"10.1.1.5", "10.1.1.7", "2001:db8::5"}
    assert {data for owner, _, data in records_of(zone) if owner == f"web-0.{name}"} == {"10.1.1.5", "2001:db8::5"}
    assert (f"_http._tcp.{name}", "SRV", f"0 100 8080 web-0.{name}") in records_of(zone)


def test_an_external_name_service_is_a_cname() -> None:
    entry = kube_entry(service(type="ExternalName", external_name="Example.COM.", cluster_ips=()), [])
    assert [(each.type, each.data) for each in entry.records] == [("CNAME", "example.com")]


def test_services_without_records() -> None:
    for empty in (service(cluster_ips=()), service(cluster_ips=("x",)), service(type="ExternalName")):
        assert kube_entry(empty, []) == EMPTY_ENTRY


def test_the_entry_of_one_service_equals_that_of_the_zone() -> None:
    both = fake_cluster(service(cluster_ips=("None",)), slice_of("web-1", backend("10.1.1.5")))
    entry, is_shared = stored_kube_entry(both.cluster, DEFAULT_TENANT, "shop", "web")
    assert entry == tenant_zone(both.cluster, DEFAULT_TENANT).entries["kube:shop:web"]
    assert not is_shared
    assert stored_kube_entry(both.cluster, BLUE, "shop", "web") == (EMPTY_ENTRY, False)


def test_a_pod_has_a_record_by_address() -> None:
    state = fake_cluster()
    state.put(network())
    created = state.attach("e1")
    pod = msgspec.structs.replace(created, pod=PodIdentity(namespace="shop", name="web-0"), container_name="shop/web-0")
    state.carry_out(state.reading().plan([put(kinds.ENDPOINT, pod)]))
    name = created.ip_address.replace(".", "-")
    found = records_of(tenant_zone(state.cluster, DEFAULT_TENANT))
    assert (f"{name}.shop.pod.cluster.local", "A", created.ip_address) in found
    assert ("web-0", "A", created.ip_address) in found


# Whatever is typed as text may be anything: the store is not always written through the API server's validation.
texts = (
    st.text(max_size=70)
    | st.from_regex(r"[a-zA-Z0-9_.-]{1,70}", fullmatch=True)
    | st.sampled_from(["x" * 63, "x" * 64])
)
slice_endpoints = st.builds(
    SliceEndpoint,
    addresses=st.lists(st.sampled_from(["10.1.1.5", "fd00::5", "garbage", ""]), max_size=3).map(tuple),
    hostname=texts,
)
slices = st.builds(
    EndpointSlice,
    address_type=st.sampled_from(["IPv4", "IPv6", "FQDN"]),
    endpoints=st.none() | st.lists(slice_endpoints, max_size=3).map(tuple),
    ports=st.none()
    | st.lists(st.builds(SlicePort, name=texts, port=st.none() | st.integers(-1, 70_000)), max_size=3).map(tuple),
)
specs = st.builds(
    ServiceSpec,
    type=st.sampled_from(["ClusterIP", "ExternalName"]),
    external_name=texts,
    cluster_ips=st.lists(st.sampled_from(["10.96.0.9", "None", "garbage", "fd00::9"]), max_size=3).map(tuple),
    ports=st.lists(st.builds(ServicePort, name=texts, port=st.integers(-1, 70_000)), max_size=3).map(tuple),
)


@given(specs, st.lists(slices, max_size=3), texts, texts)
def test_H5_whatever_a_service_has_its_records_are_below_its_own_name_and_can_be_encoded(
    spec: ServiceSpec, found: list[EndpointSlice], namespace: str, name: str
) -> None:
    document = KubeService(tenant=DEFAULT_TENANT, namespace=namespace, name=name, service=ServiceObject(spec=spec))
    own = f"{name}.{namespace}.svc.cluster.local".lower()
    for record in kube_entry(document, found).records:
        assert encode_record(record, ttl=30)
        assert encode_name(record.name)
        assert record.name == own or record.name.endswith((f".{own}", ".arpa"))
        assert record.type != "PTR" or record.data.endswith(own)


def test_H5_objects_with_invalid_addresses_cost_themselves_only() -> None:
    """H2: a node writes what it wants."""
    bad = model.Endpoint(
        tenant=DEFAULT_TENANT,
        network=NetworkName("red"),
        endpoint_id=EndpointId("bad"),
        container_name="bad",
        ip_address="garbage",
        pod=PodIdentity(namespace="shop", name="bad"),
    )
    for entry in (
        workload_entry(bad),
        service_entry(
            model.Service(name=ServiceName("vip"), tenant=DEFAULT_TENANT, network=NetworkName("red"), vip="garbage")
        ),
    ):
        assert (entry.records, entry.left_out) == ((), 1)
        assert "garbage" in entry.fault
