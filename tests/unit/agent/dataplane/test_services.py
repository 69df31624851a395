"""Services as a datapath feature: local backends follow attachments, not the store; and `/svcstats`."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fake_cluster import FakeCluster, endpoint, network, service

from weft.agent.dataplane.services import Services
from weft.agent.observe.node_state import show_service_stats
from weft.agent.store.attachment_store import AttachmentStore
from weft.domain import codec, kinds, model
from weft.domain.addresses import parse_address
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import StateItem
from weft.domain.host_access.state import ExternalAddress, NodePort, NodePortVip, is_host_scoped
from weft.domain.ids import NodeName, TenantName
from weft.domain.lifecycle.changes import endpoints
from weft.domain.lifecycle.changes.endpoints import Busy
from weft.domain.loadbalancer.kube_objects import KubeService, ServiceObject
from weft.domain.loadbalancer.state import Backend, FrontendKey
from weft.domain.policy.model.protocols import TCP, UDP
from weft.ports.datapath import ServiceFlowStats

NODE, TENANT = NodeName("one"), TenantName("default")
TENANTS = frozenset({TENANT})
LABELS = {"app": "web"}


class Scene:
    """A cluster with a service, the feature that follows it, and a datapath's state after all differences."""

    def __init__(self) -> None:
        self.world = FakeCluster()
        self.world.put(network())
        self.world.put(service(selectors=("app=web",), ports=("80:8080:TCP",), ip_address="10.1.1.200"))
        self.feature = Services(self.world.cluster, node=NODE, attachment_store=AttachmentStore())
        self.applied: set[StateItem] = set()
        self.refresh()

    def endpoint(self, name: str, *, host: str, labels: dict[str, str] = LABELS) -> model.Endpoint:
        """An endpoint with labels as it is in the store now."""
        wanted = msgspec.structs.replace(endpoint(name), host=host)
        made, plan = endpoints.plan_create(self.world.reading(), wanted, busy=Busy())
        self.world.carry_out(plan)
        made, plan = endpoints.plan_update(
            self.world.reading(), made.key, labels=labels, container_id="", container_name=""
        )
        self.world.carry_out(plan)
        self.feature.follow(kinds.ENDPOINT.store_key(*made.key))
        return made

    def take(self, difference: Difference[StateItem]) -> None:
        assert set(difference.drop) <= self.applied
        self.applied = (self.applied - set(difference.drop)) | set(difference.put)

    def refresh(self) -> None:
        self.take(self.feature.refresh(TENANTS))

    def providers(self) -> set[str]:
        self.refresh()
        assert self.applied == set(self.feature.everything(TENANTS))
        return {str(part.address) for part in self.applied if isinstance(part, Backend)}


def test_endpoints_of_other_nodes_are_backends_when_the_store_has_them() -> None:
    scene = Scene()
    far = scene.endpoint("far", host="two")
    assert scene.providers() == {far.ip_address}
    scene.endpoint("far", host="two", labels={})
    assert scene.providers() == set()
    scene.endpoint("far", host="two")
    scene.world.detach("far")
    scene.feature.follow(kinds.ENDPOINT.store_key(*far.key))
    assert scene.providers() == set()


def test_endpoints_of_this_node_are_backends_while_they_are_attached() -> None:
    """Whatever the store says: they come with their port, even before the store has them, and go with it."""
    scene = Scene()
    near = scene.endpoint("near", host=NODE)
    assert scene.providers() == set()
    scene.take(scene.feature.add_endpoint(near))
    assert scene.providers() == {near.ip_address}
    scene.take(scene.feature.remove_endpoint(near))
    assert scene.providers() == set()
    alone = msgspec.structs.replace(endpoint("alone", address="10.1.1.77"), host=NODE, labels=LABELS)
    scene.take(scene.feature.add_endpoint(alone))
    assert scene.providers() == {"10.1.1.77"}


def test_changed_labels_of_a_local_endpoint_count() -> None:
    scene = Scene()
    near = scene.endpoint("near", host=NODE, labels={})
    scene.take(scene.feature.add_endpoint(near))
    assert scene.providers() == set()
    scene.endpoint("near", host=NODE)
    assert scene.providers() == {near.ip_address}


def test_a_new_listing_yields_only_the_differences() -> None:
    scene = Scene()
    scene.endpoint("far", host="two")
    assert scene.providers()
    scene.feature.replace()
    assert not scene.feature.refresh(TENANTS)
    far = scene.endpoint("more", host="two")
    scene.feature.replace()
    scene.refresh()
    assert far.ip_address in scene.providers()


def test_a_deleted_service_leaves_nothing() -> None:
    scene = Scene()
    scene.endpoint("far", host="two")
    assert scene.providers()
    scene.world.delete(service())
    scene.feature.follow(kinds.SERVICE.store_key(*kinds.SERVICE.key_parts(service())))
    scene.refresh()
    assert scene.applied == set()


def test_a_tenant_without_endpoints_is_dropped() -> None:
    scene = Scene()
    assert not scene.feature.refresh(frozenset())
    assert scene.feature.by_tenant == {}


def use(tenant: str, client: str, protocol: int, port: int, provider: str) -> ServiceFlowStats:
    return ServiceFlowStats(
        tenant=TenantName(tenant),
        client=parse_address(client, field="client"),
        frontend=FrontendKey(parse_address("10.1.1.200", field="vip"), protocol, port),
        provider=parse_address(provider, field="provider"),
        packets_in=1,
        bytes_in=2,
        packets_out=3,
        bytes_out=4,
    )


def test_svcstats_have_every_port_and_provider() -> None:
    """W45: no statistics under a wrong address."""
    scene = Scene()
    far = scene.endpoint("far", host="two")
    scene.refresh()
    shown = show_service_stats(
        [
            use("default", "10.1.1.5", TCP, 80, far.ip_address),
            use("default", "10.1.1.5", TCP, 80, "10.1.1.99"),
            use("default", "10.1.1.5", UDP, 53, far.ip_address),
            use("other", "10.1.1.5", TCP, 80, "10.1.1.98"),
        ],
        scene.feature.by_tenant,
    )
    assert set(shown) == {"10.1.1.5", "other:10.1.1.5"}
    stats = shown["10.1.1.5"]
    assert [(each["Protocol"], each["SvcPort"], set(each["ProvStats"])) for each in stats["PortStats"]] == [
        ("TCP", "80", {far.ip_address, "10.1.1.99"}),
        ("UDP", "53", {far.ip_address}),
    ]
    assert stats["PortStats"][0]["ProvPort"] == "8080"
    assert stats["SvcStats"]["10.1.1.200"]["ProvStats"][far.ip_address] == {
        "ProviderIP": far.ip_address,
        "ServiceIP": "10.1.1.200",
        "ServiceVrf": "default",
        "PacketsIn": 1,
        "BytesIn": 2,
        "PacketsOut": 3,
        "BytesOut": 4,
    }


def kube_service(**spec: object) -> KubeService:
    members = {"spec": {"clusterIPs": ["10.96.0.10"], "ports": [{"port": 80, "nodePort": 30080}], **spec}}
    return KubeService(tenant=TENANT, namespace="lab", name="web", service=msgspec.convert(members, ServiceObject))


def put_kube(scene: Scene, document: KubeService | None) -> None:
    key = kinds.KUBE_SERVICE.store_key(TENANT, "lab", "web")
    if document is None:
        scene.world.cluster.drop(key)
    else:
        scene.world.cluster.put(key, codec.encode(document), 1)
    scene.feature.follow(key)


def host_items(scene: Scene) -> set[type]:
    return {type(part) for part in scene.applied if is_host_scoped(part)}


def test_a_tenant_is_exposed_until_its_last_exposed_service_is_deleted() -> None:
    scene = Scene()
    assert scene.feature.exposed_tenants == frozenset()
    put_kube(scene, kube_service())
    assert scene.feature.exposed_tenants == TENANTS
    put_kube(scene, kube_service(ports=[{"port": 80}]))
    assert scene.feature.exposed_tenants == frozenset()
    put_kube(scene, msgspec.structs.replace(kube_service(ports=[{"port": 80}]), shared=True))
    assert scene.feature.exposed_tenants == TENANTS
    scene.feature.replace()
    assert scene.feature.exposed_tenants == TENANTS
    put_kube(scene, None)
    assert scene.feature.exposed_tenants == frozenset()


def test_host_items_go_with_their_services() -> None:
    scene = Scene()
    put_kube(scene, kube_service())
    scene.refresh()
    assert host_items(scene) == {NodePortVip, NodePort, ExternalAddress}
    put_kube(scene, None)
    scene.refresh()
    assert host_items(scene) == set()


def test_a_service_of_another_proxy_is_ignored() -> None:
    """Until its label is gone, and from when it has one."""
    scene = Scene()
    put_kube(scene, kube_service())
    scene.refresh()
    before = set(scene.applied)
    put_kube(scene, msgspec.structs.replace(kube_service(), foreign=True))
    scene.refresh()
    assert scene.feature.exposed_tenants == frozenset()
    assert host_items(scene) == set()
    assert not any("10.96.0.10" in str(part) for part in scene.applied)
    put_kube(scene, kube_service())
    scene.refresh()
    assert scene.applied == before


def test_the_host_reaches_the_cluster_dns_service() -> None:
    """On every node, in the tenant that the service belongs to."""
    scene = Scene()
    plain = kube_service(ports=[{"port": 53, "protocol": "UDP"}])
    put_kube(scene, msgspec.structs.replace(plain, cluster_dns=True))
    scene.refresh()
    assert scene.feature.exposed_tenants == TENANTS
    assert ExternalAddress(TENANT, parse_address("10.96.0.10", field="names"), "host") in scene.applied
    put_kube(scene, None)
    scene.refresh()
    assert host_items(scene) == set()


@pytest.mark.parametrize("relisted", [False, True])
def test_host_items_go_with_the_tenant(relisted: bool) -> None:
    """They are not in the tenant netns, with which the rest goes; also when the cluster is listed again."""
    scene = Scene()
    put_kube(scene, kube_service())
    scene.refresh()
    if relisted:
        scene.feature.replace()
    scene.take(scene.feature.refresh(frozenset()))
    assert host_items(scene) == set()
    assert not scene.feature.refresh(frozenset())


def test_a_later_external_range_applies_at_once() -> None:
    scene = Scene()
    put_kube(scene, kube_service(externalIPs=["198.51.100.7"]))
    scene.refresh()
    before = scene.applied
    scene.world.put(model.Tenant(name=TENANT, external_ranges=("198.51.100.0/24",)))
    scene.feature.follow(kinds.TENANT.store_key(TENANT))
    scene.refresh()
    assert ExternalAddress(TENANT, parse_address("198.51.100.7", field="outer"), "world") in scene.applied - before


def test_an_invalid_service_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not with every slice that changes, and again when it is something else."""
    scene = Scene()
    for addresses in (["198.51.100.7"], ["198.51.100.7"], ["198.51.100.8"]):
        put_kube(scene, kube_service(externalIPs=addresses))
        scene.refresh()
    assert [record.getMessage() for record in caplog.records] == ["ignoring invalid service"] * 2
