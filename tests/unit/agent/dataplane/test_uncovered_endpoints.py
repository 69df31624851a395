"""H3: a hostile node that writes to etcd directly gets no identity, backend or name by an endpoint of its own."""

from __future__ import annotations

import pytest
from tests.support.fake_cluster import DEFAULT, FakeCluster, group, network, policy, rule, service

from weft.agent.dataplane.desired_state import DesiredState, make_features
from weft.agent.store.attachment_store import AttachmentStore
from weft.domain import codec, kinds, model
from weft.domain.desired.state import StateItem
from weft.domain.dns.zones import tenant_zone
from weft.domain.ids import EndpointId, NetworkName, NodeName, StoreKey
from weft.domain.ipam import ipam
from weft.domain.store_types import Change, Event
from weft.domain.transaction import holder_of

TENANTS = frozenset({DEFAULT})


class Node:
    """A node of the tenant, and a store to which somebody else writes."""

    def __init__(self) -> None:
        self._world = FakeCluster()
        self._world.put(network())
        self._world.put(policy())
        self._world.put(group("web"))
        self._world.put(rule(action="allow", from_endpoint_group="web"))
        self._world.put(group("db", policies=("p",)))
        self._world.put(service())
        self.victim = self._world.attach("victim", group="db", address="10.1.1.5")
        self.cluster = self._world.cluster
        attachments = AttachmentStore()
        node = NodeName("here")
        self._features = make_features(self.cluster, node=node, attachment_store=attachments)
        self._desired = DesiredState(self.cluster, node=node, attachment_store=attachments, features=self._features)
        self._revision = 1000
        self._items: set[StateItem] = set()
        self.seen()

    def write(self, key: StoreKey, value: bytes | None) -> None:
        self._revision += 1
        change = Change(self._revision, (Event(key, value),))
        self.cluster.apply(change)
        self._desired.apply(change)

    def seen(self) -> tuple[frozenset[StateItem], frozenset[str]]:
        """What the datapath gets by differences, and the names that DNS serves."""
        for feature in self._features:
            difference = feature.refresh(TENANTS)
            self._items.difference_update(difference.drop)
            self._items.update(difference.put)
        return frozenset(self._items), frozenset(tenant_zone(self.cluster, DEFAULT).entries)


def hostile(address: str) -> model.Endpoint:
    return model.Endpoint(
        tenant=DEFAULT,
        network=NetworkName("blue"),
        endpoint_id=EndpointId("evil"),
        group="web",
        ip_address=address,
        host="mallory",
        labels={"app": "web"},
        container_name="evil",
    )


@pytest.mark.parametrize("address", ["10.1.1.5", "10.1.1.77"], ids=["of another endpoint", "free"])
def test_H3_policy_services_and_dns_ignore_an_endpoint_without_block_or_claim(address: str) -> None:
    node = Node()
    before = node.seen()
    endpoint = hostile(address)
    node.write(kinds.ENDPOINT.store_key(*endpoint.key), codec.encode(endpoint))
    assert node.seen() == before
    assert list(node.cluster.uncovered) == [tuple(endpoint.key)]


def test_H3_an_endpoint_counts_from_its_claim_on_and_no_longer() -> None:
    """A restore writes documents in any order."""
    node = Node()
    before = node.seen()
    endpoint = hostile("10.1.1.77")
    claim = ipam.claim_key(network(), *endpoint.addresses)
    node.write(kinds.ENDPOINT.store_key(*endpoint.key), codec.encode(endpoint))
    node.write(claim, codec.encode(model.Claim(holder=holder_of(kinds.ENDPOINT, endpoint))))
    items, names = node.seen()
    assert {type(item).__name__ for item in items - before[0]} >= {"IpIdentity", "Backend"}
    assert names > before[1]
    node.write(claim, None)
    assert node.seen() == before
