"""NetworkPolicies and labels of the store reach the engine of every tenant on the node (W47)."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fake_cluster import DEFAULT, FakeCluster, network

from weft.agent.dataplane.policy import Policies
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain import kinds, model
from weft.domain.desired.state import Port, host_ifname
from weft.domain.ids import NodeName
from weft.domain.model import PodIdentity, PodPort
from weft.domain.policy.compile.kube_objects import KubeNamespace, KubePolicy
from weft.domain.policy.model.netpol import IngressRule, PolicyPeer, PolicyPort, PolicySpec
from weft.domain.policy.model.protocols import TCP
from weft.domain.selectors import LabelSelector
from weft.domain.store_types import Delete
from weft.domain.transaction import put
from weft.ports.datapath import EndpointConfig

NODE = NodeName("one")


class PolicyScene:
    """`web` of the namespace `shop` is here; `client` of the namespace `guests` is on another node."""

    def __init__(self) -> None:
        self.world = FakeCluster()
        self.world.put(network("blue", "10.1.1.0/24"))
        self.attachment_store = AttachmentStore()
        self.policies = Policies(self.world.cluster, node=NODE, attachment_store=self.attachment_store)
        self.web = self._pod("web", "shop", host=NODE)
        self.client = self._pod("client", "guests", host="two")
        port = Port(DEFAULT, host_ifname(self.web.key), "02:00:00:00:00:01", tuple(self.web.addresses))
        config = EndpointConfig(port=port, netns="/paper/web", interface="eth0", addresses=(), mtu=1450)
        self.attachment_store.put(Attachment(endpoint=self.web, published=True, stage=Stage.ATTACHED, config=config))
        self.policies.refresh({DEFAULT})

    def _pod(self, name: str, namespace: str, *, host: str) -> model.Endpoint:
        identity = PodIdentity(namespace=namespace, name=name, uid=name, ports=(PodPort("http", TCP, 80),))
        made = self.world.attach(name)
        endpoint = msgspec.structs.replace(made, host=host, pod=identity, labels={"app": name})
        self.put(endpoint)
        return endpoint

    def put(self, *values: model.Value) -> None:
        for value in values:
            kind = next(kind for kind in kinds.ALL if kind.type is type(value))
            self.world.carry_out(self.world.reading().plan([put(kind, value)]))
            self.policies.follow(kind.store_key(*kind.key_parts(value)))

    def delete(self, value: model.Value) -> None:
        kind = next(kind for kind in kinds.ALL if kind.type is type(value))
        key = kind.store_key(*kind.key_parts(value))
        self.world.carry_out(self.world.reading().plan([Delete(key)]))
        self.policies.follow(key)

    def is_allowed(self, port: int = 80) -> bool:
        self.policies.refresh({DEFAULT})
        engine = self.policies.by_tenant[DEFAULT].engine
        ends = str(self.client.key), str(self.web.key)
        flow = engine.directory.flow(*ends, protocol=TCP, port=port, version=4, tenant=DEFAULT)
        return engine.verdict(flow).allowed


@pytest.fixture
def scene() -> PolicyScene:
    return PolicyScene()


def allowing(labels: dict[str, str], *, port: int | str = "http", app: str = "web") -> KubePolicy:
    """Allow one port of an app's pods from namespaces with these labels."""
    peer = PolicyPeer(namespace_selector=LabelSelector(match_labels=labels))
    rule = IngressRule(from_=(peer,), ports=(PolicyPort(port=port),))
    spec = PolicySpec(pod_selector=LabelSelector(match_labels={"app": app}), policy_types=("Ingress",), ingress=(rule,))
    return KubePolicy(namespace="shop", name="p", spec=spec)


def test_a_policy_is_added_changed_and_deleted(scene: PolicyScene) -> None:
    """W47: NetworkPolicy was a stub."""
    assert scene.is_allowed()
    scene.put(KubeNamespace(name="guests", labels={"team": "a"}))
    scene.put(allowing({"team": "a"}))
    assert (scene.is_allowed(), scene.is_allowed(81)) == (True, False)
    scene.put(allowing({"team": "a"}, port=81))
    assert (scene.is_allowed(), scene.is_allowed(81)) == (False, True)
    scene.delete(allowing({}))
    assert scene.is_allowed()


def test_changed_namespace_labels_apply_at_once(scene: PolicyScene) -> None:
    scene.put(KubeNamespace(name="guests"), allowing({"team": "a"}))
    assert not scene.is_allowed()
    scene.put(KubeNamespace(name="guests", labels={"team": "a"}))
    assert scene.is_allowed()
    scene.delete(KubeNamespace(name="guests"))
    assert not scene.is_allowed()


def test_changed_pod_labels_apply_at_once(scene: PolicyScene) -> None:
    """Labels of a local endpoint come from the store; everything else comes from its attachment."""
    scene.put(allowing({"team": "none"}))
    assert not scene.is_allowed()
    scene.put(msgspec.structs.replace(scene.web, labels={"app": "db"}))
    assert scene.is_allowed()
    scene.put(msgspec.structs.replace(scene.web, labels={"app": "web"}))
    assert not scene.is_allowed()


def test_policy_is_enforced_until_the_pod_is_detached(scene: PolicyScene) -> None:
    """Its endpoint may be deleted, or reused, in the store: the attachment counts."""
    scene.put(allowing({"team": "none"}))
    scene.delete(scene.web)
    assert not scene.is_allowed()
    scene.put(msgspec.structs.replace(scene.web, host="two", labels={"app": "db"}))
    assert not scene.is_allowed()


def test_a_label_does_not_change_the_namespace(scene: PolicyScene) -> None:
    """CVE-2023-39347: labels cannot set the namespace."""
    scene.put(
        KubeNamespace(name="guests"), KubeNamespace(name="friends", labels={"team": "a"}), allowing({"team": "a"})
    )
    forged = {"kubernetes.io/metadata.name": "friends", "team": "a", "io.kubernetes.pod.namespace": "friends"}
    scene.put(msgspec.structs.replace(scene.client, labels=forged))
    assert not scene.is_allowed()
