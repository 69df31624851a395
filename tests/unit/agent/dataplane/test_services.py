"""The topic of services: who provides on this node, whatever the store says meanwhile; and what `/svcstats` tells."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fake_cluster import FakeCluster, endpoint, network, service

from weft.agent.dataplane.services import Services
from weft.agent.observe.svcstats import show_uses
from weft.agent.store.attachment_store import AttachmentStore
from weft.domain import codec, kinds, model
from weft.domain.addresses import parse_address
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import StateItem
from weft.domain.host_access.state import ExternalAddress, NodePort, NodePortVip, is_hosts
from weft.domain.ids import NodeName, TenantName
from weft.domain.lifecycle.changes import endpoints
from weft.domain.lifecycle.changes.endpoints import Busy
from weft.domain.loadbalancer.kube_objects import DeclaredService, KubeService
from weft.domain.loadbalancer.state import Backend, FrontendKey
from weft.domain.policy.model.protocols import TCP, UDP
from weft.ports.datapath import ServiceFlowStats

NODE, TENANT = NodeName("one"), TenantName("default")
TENANTS = frozenset({TENANT})
LABELS = {"app": "web"}


class Scene:
    """A cluster with a service, the topic that follows it, and what a datapath has that is told all differences."""

    def __init__(self) -> None:
        self.world = FakeCluster()
        self.world.put(network())
        self.world.put(service(selectors=("app=web",), ports=("80:8080:TCP",), ip_address="10.1.1.200"))
        self.topic = Services(self.world.cluster, node=NODE, journal=AttachmentStore())
        self.told: set[StateItem] = set()
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
        self.topic.follow(kinds.ENDPOINT.store_key(*made.key))
        return made

    def take(self, difference: Difference[StateItem]) -> None:
        assert set(difference.drop) <= self.told
        self.told = (self.told - set(difference.drop)) | set(difference.put)

    def refresh(self) -> None:
        self.take(self.topic.refresh(TENANTS))

    def providers(self) -> set[str]:
        self.refresh()
        assert self.told == set(self.topic.everything(TENANTS))
        return {str(part.address) for part in self.told if isinstance(part, Backend)}


def test_workloads_of_other_nodes_are_known_from_the_store() -> None:
    scene = Scene()
    far = scene.endpoint("far", host="two")
    assert scene.providers() == {far.ip_address}
    scene.endpoint("far", host="two", labels={})
    assert scene.providers() == set()
    scene.endpoint("far", host="two")
    scene.world.detach("far")
    scene.topic.follow(kinds.ENDPOINT.store_key(*far.key))
    assert scene.providers() == set()


def test_workloads_of_this_node_provide_while_they_are_attached() -> None:
    """Whatever the store says: before it has heard of them they come with their port, and go with it."""
    scene = Scene()
    near = scene.endpoint("near", host=NODE)
    assert scene.providers() == set()
    scene.take(scene.topic.add_endpoint(near))
    assert scene.providers() == {near.ip_address}
    scene.take(scene.topic.dismiss(near))
    assert scene.providers() == set()
    alone = msgspec.structs.replace(endpoint("alone", address="10.1.1.77"), host=NODE, labels=LABELS)
    scene.take(scene.topic.add_endpoint(alone))
    assert scene.providers() == {"10.1.1.77"}


def test_other_labels_of_a_workload_of_this_node_count() -> None:
    scene = Scene()
    near = scene.endpoint("near", host=NODE, labels={})
    scene.take(scene.topic.add_endpoint(near))
    assert scene.providers() == set()
    scene.endpoint("near", host=NODE)
    assert scene.providers() == {near.ip_address}


def test_a_new_reading_of_the_cluster_tells_only_what_differs() -> None:
    scene = Scene()
    scene.endpoint("far", host="two")
    assert scene.providers()
    scene.topic.replace()
    assert not scene.topic.refresh(TENANTS)
    far = scene.endpoint("more", host="two")
    scene.topic.replace()
    scene.refresh()
    assert far.ip_address in scene.providers()


def test_a_service_goes_and_takes_all_with_it() -> None:
    scene = Scene()
    scene.endpoint("far", host="two")
    assert scene.providers()
    scene.world.delete(service())
    scene.topic.follow(kinds.SERVICE.store_key(*kinds.SERVICE.key_parts(service())))
    scene.refresh()
    assert scene.told == set()


def test_a_tenant_that_leaves_is_forgotten() -> None:
    scene = Scene()
    assert not scene.topic.refresh(frozenset())
    assert scene.topic.by_tenant == {}


def use(tenant: str, client: str, protocol: int, port: int, provider: str) -> ServiceFlowStats:
    return ServiceFlowStats(
        tenant=TenantName(tenant),
        client=parse_address(client, field="client"),
        front=FrontendKey(parse_address("10.1.1.200", field="vip"), protocol, port),
        provider=parse_address(provider, field="provider"),
        packets_in=1,
        octets_in=2,
        packets_out=3,
        octets_out=4,
    )


def test_svcstats_have_every_port_and_provider() -> None:
    """W45: nothing is told about the wrong address."""
    scene = Scene()
    far = scene.endpoint("far", host="two")
    scene.refresh()
    shown = show_uses(
        [
            use("default", "10.1.1.5", TCP, 80, far.ip_address),
            use("default", "10.1.1.5", TCP, 80, "10.1.1.99"),
            use("default", "10.1.1.5", UDP, 53, far.ip_address),
            use("other", "10.1.1.5", TCP, 80, "10.1.1.98"),
        ],
        scene.topic.by_tenant,
    )
    assert set(shown) == {"10.1.1.5", "other:10.1.1.5"}
    told = shown["10.1.1.5"]
    assert [(each["Protocol"], each["SvcPort"], set(each["ProvStats"])) for each in told["PortStats"]] == [
        ("TCP", "80", {far.ip_address, "10.1.1.99"}),
        ("UDP", "53", {far.ip_address}),
    ]
    assert told["PortStats"][0]["ProvPort"] == "8080"
    assert told["SvcStats"]["10.1.1.200"]["ProvStats"][far.ip_address] == {
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
    return KubeService(tenant=TENANT, namespace="lab", name="web", service=msgspec.convert(members, DeclaredService))


def put_kube(scene: Scene, document: KubeService | None) -> None:
    key = kinds.KUBE_SERVICE.store_key(TENANT, "lab", "web")
    if document is None:
        scene.world.cluster.drop(key)
    else:
        scene.world.cluster.put(key, codec.encode(document), 1)
    scene.topic.follow(key)


def host_parts(scene: Scene) -> set[type]:
    return {type(part) for part in scene.told if is_hosts(part)}


def test_a_tenant_whose_services_are_asked_outside_is_open_until_the_last_of_them_goes() -> None:
    scene = Scene()
    assert scene.topic.open_tenants == frozenset()
    put_kube(scene, kube_service())
    assert scene.topic.open_tenants == TENANTS
    put_kube(scene, kube_service(ports=[{"port": 80}]))
    assert scene.topic.open_tenants == frozenset()
    put_kube(scene, msgspec.structs.replace(kube_service(ports=[{"port": 80}]), shared=True))
    assert scene.topic.open_tenants == TENANTS
    scene.topic.replace()
    assert scene.topic.open_tenants == TENANTS
    put_kube(scene, None)
    assert scene.topic.open_tenants == frozenset()


def test_what_the_host_has_for_services_goes_with_them() -> None:
    scene = Scene()
    put_kube(scene, kube_service())
    scene.refresh()
    assert host_parts(scene) == {NodePortVip, NodePort, ExternalAddress}
    put_kube(scene, None)
    scene.refresh()
    assert host_parts(scene) == set()


def test_a_service_that_somebody_else_balances_is_left_to_him() -> None:
    """Until its label is gone, and from when it has one."""
    scene = Scene()
    put_kube(scene, kube_service())
    scene.refresh()
    before = set(scene.told)
    put_kube(scene, msgspec.structs.replace(kube_service(), foreign=True))
    scene.refresh()
    assert scene.topic.open_tenants == frozenset()
    assert host_parts(scene) == set()
    assert not any("10.96.0.10" in str(part) for part in scene.told)
    put_kube(scene, kube_service())
    scene.refresh()
    assert scene.told == before


def test_the_host_may_ask_where_pods_ask_for_names() -> None:
    """On every node, in the tenant that the service belongs to."""
    scene = Scene()
    plain = kube_service(ports=[{"port": 53, "protocol": "UDP"}])
    put_kube(scene, msgspec.structs.replace(plain, names=True))
    scene.refresh()
    assert scene.topic.open_tenants == TENANTS
    assert ExternalAddress(TENANT, parse_address("10.96.0.10", field="names"), "host") in scene.told
    put_kube(scene, None)
    scene.refresh()
    assert host_parts(scene) == set()


@pytest.mark.parametrize("anew", [False, True])
def test_what_the_host_has_for_services_goes_with_the_tenant(anew: bool) -> None:
    """It is not in the tenant's space, which takes the rest along; also when the cluster is read anew meanwhile."""
    scene = Scene()
    put_kube(scene, kube_service())
    scene.refresh()
    if anew:
        scene.topic.replace()
    scene.take(scene.topic.refresh(frozenset()))
    assert host_parts(scene) == set()
    assert not scene.topic.refresh(frozenset())


def test_a_range_that_comes_later_counts_at_once() -> None:
    scene = Scene()
    put_kube(scene, kube_service(externalIPs=["198.51.100.7"]))
    scene.refresh()
    before = scene.told
    scene.world.put(model.Tenant(name=TENANT, external_ranges=("198.51.100.0/24",)))
    scene.topic.follow(kinds.TENANT.store_key(TENANT))
    scene.refresh()
    assert ExternalAddress(TENANT, parse_address("198.51.100.7", field="outer"), "world") in scene.told - before


def test_what_has_no_effect_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not with every slice that changes, and again when it is something else."""
    scene = Scene()
    for addresses in (["198.51.100.7"], ["198.51.100.7"], ["198.51.100.8"]):
        put_kube(scene, kube_service(externalIPs=addresses))
        scene.refresh()
    assert [record.getMessage() for record in caplog.records] == ["service without effect"] * 2
