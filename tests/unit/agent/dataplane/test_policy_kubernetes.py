"""NetworkPolicies and labels of the store reach the engine of every tenant on the node (W47)."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fake_cluster import DEFAULT, FakeCluster, network

from weft.agent.dataplane.policy import Policies
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain import kinds, model
from weft.domain.desired.state import Port, host_end
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


class Town:
    """`web` of the namespace `shop` is here; `client` of the namespace `guests` is on another node."""

    def __init__(self) -> None:
        self.world = FakeCluster()
        self.world.put(network("blue", "10.1.1.0/24"))
        self.journal = AttachmentStore()
        self.policies = Policies(self.world.cluster, node=NODE, journal=self.journal)
        self.web = self._pod("web", "shop", host=NODE)
        self.client = self._pod("client", "guests", host="two")
        port = Port(DEFAULT, host_end(self.web.key), "02:00:00:00:00:01", tuple(self.web.addresses))
        wiring = EndpointConfig(port=port, netns="/paper/web", interface="eth0", addresses=(), mtu=1450)
        self.journal.put(Attachment(endpoint=self.web, published=True, stage=Stage.ATTACHED, wiring=wiring))
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

    def passes(self, port: int = 80) -> bool:
        self.policies.refresh({DEFAULT})
        engine = self.policies.by_tenant[DEFAULT].engine
        ends = str(self.client.key), str(self.web.key)
        flow = engine.directory.flow(*ends, protocol=TCP, port=port, version=4, tenant=DEFAULT)
        return engine.verdict(flow).allowed


@pytest.fixture
def town() -> Town:
    return Town()


def allowing(labels: dict[str, str], *, port: int | str = "http", app: str = "web") -> KubePolicy:
    """Those of namespaces with the labels reach one port of the pods of an app."""
    peer = PolicyPeer(namespace_selector=LabelSelector(match_labels=labels))
    rule = IngressRule(from_=(peer,), ports=(PolicyPort(port=port),))
    spec = PolicySpec(pod_selector=LabelSelector(match_labels={"app": app}), policy_types=("Ingress",), ingress=(rule,))
    return KubePolicy(namespace="shop", name="p", spec=spec)


def test_a_policy_comes_is_changed_and_goes(town: Town) -> None:
    """W47: NetworkPolicy was a stub."""
    assert town.passes()
    town.put(KubeNamespace(name="guests", labels={"team": "a"}))
    town.put(allowing({"team": "a"}))
    assert (town.passes(), town.passes(81)) == (True, False)
    town.put(allowing({"team": "a"}, port=81))
    assert (town.passes(), town.passes(81)) == (False, True)
    town.delete(allowing({}))
    assert town.passes()


def test_labels_of_a_namespace_decide_at_once(town: Town) -> None:
    town.put(KubeNamespace(name="guests"), allowing({"team": "a"}))
    assert not town.passes()
    town.put(KubeNamespace(name="guests", labels={"team": "a"}))
    assert town.passes()
    town.delete(KubeNamespace(name="guests"))
    assert not town.passes()


def test_labels_of_pods_here_and_elsewhere_decide_at_once(town: Town) -> None:
    """A workload of this node has the labels that the store knows; everything else is known from its attachment."""
    town.put(allowing({"team": "none"}))
    assert not town.passes()
    town.put(msgspec.structs.replace(town.web, labels={"app": "db"}))
    assert town.passes()
    town.put(msgspec.structs.replace(town.web, labels={"app": "web"}))
    assert not town.passes()


def test_a_pod_is_enforced_until_it_is_gone_from_the_node(town: Town) -> None:
    """Its endpoint may be deleted, or another's by then: what is plugged is what was admitted."""
    town.put(allowing({"team": "none"}))
    town.delete(town.web)
    assert not town.passes()
    town.put(msgspec.structs.replace(town.web, host="two", labels={"app": "db"}))
    assert not town.passes()


def test_a_label_moves_nobody_into_another_namespace(town: Town) -> None:
    """CVE-2023-39347: the namespace is our own word."""
    town.put(KubeNamespace(name="guests"), KubeNamespace(name="friends", labels={"team": "a"}), allowing({"team": "a"}))
    forged = {"kubernetes.io/metadata.name": "friends", "team": "a", "io.kubernetes.pod.namespace": "friends"}
    town.put(msgspec.structs.replace(town.client, labels=forged))
    assert not town.passes()
