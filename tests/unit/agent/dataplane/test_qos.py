"""The shapes of a node's workloads: told once, told anew where they change, and only for those who are here."""

from __future__ import annotations

import pytest

from weft.agent.dataplane.qos import Profiles
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import QosProfile, host_end
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


def attach(journal: AttachmentStore, name: str, *, group: str, stage: Stage = Stage.ATTACHED) -> model.Endpoint:
    endpoint = model.Endpoint(
        tenant=BLUE, network=NetworkName("net"), endpoint_id=EndpointId(name), group=GroupName(group)
    )
    journal.put(Attachment(endpoint=endpoint, published=True, stage=stage))
    return endpoint


def shape(endpoint: model.Endpoint, dscp: int) -> QosProfile:
    return QosProfile(BLUE, host_end(endpoint.key), 0, 0, dscp)


def test_only_what_changes_is_told(cluster: Cluster) -> None:
    journal = AttachmentStore()
    profiles = Profiles(cluster, journal)
    a, b = attach(journal, "a", group="gold"), attach(journal, "b", group="tin")
    assert profiles.everything(HERE) == {shape(a, 10), shape(b, 10)}
    assert profiles.refresh(HERE) == NOTHING
    put_profile(cluster, "tin", dscp=12)
    profiles.follow(kinds.PROFILE.store_key(BLUE, "tin"))
    assert profiles.refresh(HERE) == Difference((shape(b, 12),), (shape(b, 10),))
    put_profile(cluster, "gold", dscp=0)
    assert profiles.refresh(HERE) == NOTHING, "nobody has said that there is something new"
    profiles.replace()
    assert profiles.refresh(HERE) == Difference((), (shape(a, 10),))


def test_a_workload_is_told_of_with_its_port_and_not_again(cluster: Cluster) -> None:
    journal = AttachmentStore()
    profiles = Profiles(cluster, journal)
    assert profiles.everything(HERE) == frozenset()
    a = attach(journal, "a", group="gold", stage=Stage.WIRING)
    assert profiles.add_endpoint(a) == Difference((shape(a, 10),), ())
    assert profiles.add_endpoint(attach(journal, "none", group="")) == NOTHING
    profiles.replace()
    assert profiles.refresh(HERE) == NOTHING


def test_a_shape_goes_with_its_port_and_without_a_word(cluster: Cluster) -> None:
    journal = AttachmentStore()
    profiles = Profiles(cluster, journal)
    a = attach(journal, "a", group="gold")
    profiles.add_endpoint(a)
    journal.change(a.key, stage=Stage.LEAVING)
    profiles.dismiss(a)
    profiles.replace()
    assert profiles.refresh(HERE) == NOTHING


def test_a_profile_taken_away_before_the_port_is_there_leaves_nothing_to_take_away(cluster: Cluster) -> None:
    """A round may come between the note and the port: then the datapath has been told of what it could not have."""
    journal = AttachmentStore()
    profiles = Profiles(cluster, journal)
    a = attach(journal, "a", group="gold", stage=Stage.WIRING)
    assert profiles.everything(HERE) == {shape(a, 10)}
    put_profile(cluster, "gold", dscp=0)
    assert profiles.add_endpoint(a) == NOTHING
    profiles.replace()
    assert profiles.refresh(HERE) == NOTHING


def test_a_profile_that_nobody_should_have_stored_has_no_effect(cluster: Cluster) -> None:
    journal = AttachmentStore()
    profiles = Profiles(cluster, journal)
    a, b = attach(journal, "a", group="gold"), attach(journal, "b", group="tin")
    put_profile(cluster, "gold", dscp=99)
    assert profiles.everything(HERE) == {shape(b, 10)}
    assert profiles.add_endpoint(a) == NOTHING


def test_a_tenant_without_a_space_here_waits_for_it(cluster: Cluster) -> None:
    journal = AttachmentStore()
    profiles = Profiles(cluster, journal)
    a = attach(journal, "a", group="gold", stage=Stage.WIRING)
    assert profiles.refresh(frozenset()) == NOTHING
    assert profiles.add_endpoint(a) == Difference((shape(a, 10),), ())
