"""QoS as a datapath feature: differences when groups, profiles or local endpoints change."""

from __future__ import annotations

import pytest

from weft.agent.dataplane.qos import QosProfiles
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import QosProfile, host_ifname
from weft.domain.ids import EndpointId, GroupName, NetworkName, ProfileName, TenantName

BLUE = TenantName("blue")
HERE = frozenset({BLUE})
NOTHING: Difference[QosProfile] = Difference((), ())


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    for name in ("gold", "tin"):
        put_profile(cluster, name, dscp=10)
        group = model.Group(
            tenant=BLUE, name=GroupName(name), network=NetworkName("net"), net_profile=ProfileName(name)
        )
        cluster.put(kinds.GROUP.store_key(BLUE, name), codec.encode(group), 1)
    assert not cluster.faults
    return cluster


def put_profile(cluster: Cluster, name: str, *, dscp: int) -> None:
    profile = model.Profile(tenant=BLUE, name=ProfileName(name), dscp=dscp)
    cluster.put(kinds.PROFILE.store_key(BLUE, name), codec.encode(profile), 1)


def attach(
    attachment_store: AttachmentStore, name: str, *, group: str, stage: Stage = Stage.ATTACHED
) -> model.Endpoint:
    endpoint = model.Endpoint(
        tenant=BLUE, network=NetworkName("net"), endpoint_id=EndpointId(name), group=GroupName(group)
    )
    attachment_store.put(Attachment(endpoint=endpoint, published=True, stage=stage))
    return endpoint


def shape(endpoint: model.Endpoint, dscp: int) -> QosProfile:
    return QosProfile(BLUE, host_ifname(endpoint.key), 0, 0, dscp)


def test_only_differences_are_returned(cluster: Cluster) -> None:
    attachment_store = AttachmentStore()
    profiles = QosProfiles(cluster, attachment_store)
    a, b = attach(attachment_store, "a", group="gold"), attach(attachment_store, "b", group="tin")
    assert profiles.everything(HERE) == {shape(a, 10), shape(b, 10)}
    assert profiles.refresh(HERE) == NOTHING
    put_profile(cluster, "tin", dscp=12)
    profiles.follow(kinds.PROFILE.store_key(BLUE, "tin"))
    assert profiles.refresh(HERE) == Difference((shape(b, 12),), (shape(b, 10),))
    put_profile(cluster, "gold", dscp=0)
    assert profiles.refresh(HERE) == NOTHING, "no event has marked it as touched"
    profiles.replace()
    assert profiles.refresh(HERE) == Difference((), (shape(a, 10),))


def test_a_profile_is_put_with_its_port_and_not_again(cluster: Cluster) -> None:
    attachment_store = AttachmentStore()
    profiles = QosProfiles(cluster, attachment_store)
    assert profiles.everything(HERE) == frozenset()
    a = attach(attachment_store, "a", group="gold", stage=Stage.CONFIGURING)
    assert profiles.add_endpoint(a) == Difference((shape(a, 10),), ())
    assert profiles.add_endpoint(attach(attachment_store, "none", group="")) == NOTHING
    profiles.replace()
    assert profiles.refresh(HERE) == NOTHING


def test_a_profile_goes_with_its_port_without_a_difference(cluster: Cluster) -> None:
    attachment_store = AttachmentStore()
    profiles = QosProfiles(cluster, attachment_store)
    a = attach(attachment_store, "a", group="gold")
    profiles.add_endpoint(a)
    attachment_store.update(a.key, stage=Stage.DELETING)
    profiles.remove_endpoint(a)
    profiles.replace()
    assert profiles.refresh(HERE) == NOTHING


def test_a_profile_removed_before_its_port_exists_leaves_nothing_to_drop(cluster: Cluster) -> None:
    """A round may come after the attachment is recorded and before its port exists."""
    attachment_store = AttachmentStore()
    profiles = QosProfiles(cluster, attachment_store)
    a = attach(attachment_store, "a", group="gold", stage=Stage.CONFIGURING)
    assert profiles.everything(HERE) == {shape(a, 10)}
    put_profile(cluster, "gold", dscp=0)
    assert profiles.add_endpoint(a) == NOTHING
    profiles.replace()
    assert profiles.refresh(HERE) == NOTHING


def test_an_invalid_stored_profile_keeps_its_last_good_value(cluster: Cluster) -> None:
    attachment_store = AttachmentStore()
    profiles = QosProfiles(cluster, attachment_store)
    a, b = attach(attachment_store, "a", group="gold"), attach(attachment_store, "b", group="tin")
    put_profile(cluster, "gold", dscp=99)
    assert profiles.everything(HERE) == {shape(a, 10), shape(b, 10)}


def test_a_tenant_without_a_netns_gets_no_profile(cluster: Cluster) -> None:
    attachment_store = AttachmentStore()
    profiles = QosProfiles(cluster, attachment_store)
    a = attach(attachment_store, "a", group="gold", stage=Stage.CONFIGURING)
    assert profiles.refresh(frozenset()) == NOTHING
    assert profiles.add_endpoint(a) == Difference((shape(a, 10),), ())
