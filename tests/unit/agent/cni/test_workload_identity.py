"""K3: labels choose tenant, network and group; defaults where they are silent."""

from __future__ import annotations

import pytest

from weft.agent.cni.workload_identity import Placement, place
from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.placement import GROUP_LABEL, NETWORK_LABEL, TENANT_LABEL
from weft.domain.errors import Invalid
from weft.domain.ids import DEFAULT_TENANT, GroupName, NetworkName, TenantName


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    blue = model.Tenant(name=TenantName("blue"), default_network="usual")
    web = model.Group(tenant=TenantName("blue"), name=GroupName("web"), network=NetworkName("web-net"))
    cluster.put(kinds.TENANT.store_key("blue"), codec.encode(blue), 1)
    default = model.Tenant(name=DEFAULT_TENANT)
    cluster.put(kinds.TENANT.store_key(DEFAULT_TENANT), codec.encode(default), 1)
    cluster.put(kinds.GROUP.store_key("blue", "web"), codec.encode(web), 1)
    return cluster


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({}, ("default", "default-net", "")),
        ({TENANT_LABEL: "blue"}, ("blue", "usual", "")),
        ({TENANT_LABEL: "blue", NETWORK_LABEL: "other"}, ("blue", "other", "")),
        ({TENANT_LABEL: "blue", GROUP_LABEL: "web"}, ("blue", "web-net", "web")),
        ({TENANT_LABEL: "blue", NETWORK_LABEL: "other", GROUP_LABEL: "web"}, ("blue", "other", "web")),
        ({NETWORK_LABEL: "other"}, ("default", "other", "")),
    ],
)
def test_labels_choose(cluster: Cluster, labels: dict[str, str], expected: tuple[str, str, str]) -> None:
    tenant, network, group = expected
    assert place(cluster, labels) == Placement(TenantName(tenant), NetworkName(network), GroupName(group))


def test_a_label_that_is_no_name_is_refused_by_name(cluster: Cluster) -> None:
    with pytest.raises(Invalid) as refusal:
        place(cluster, {TENANT_LABEL: "../etc"})
    assert refusal.value.field == TENANT_LABEL


@pytest.mark.parametrize(
    ("labels", "field", "message"),
    [
        ({TENANT_LABEL: "nosuch"}, TENANT_LABEL, "tenant 'nosuch' does not exist"),
        ({TENANT_LABEL: "Blue"}, TENANT_LABEL, "tenant 'Blue' does not exist"),
        ({GROUP_LABEL: "web"}, GROUP_LABEL, "group 'web' of tenant 'default' does not exist"),
        ({TENANT_LABEL: "blue", GROUP_LABEL: "wep"}, GROUP_LABEL, "group 'wep' of tenant 'blue' does not exist"),
        ({"io.contiv.tennant": "blue"}, "io.contiv.tennant", "'io.contiv.tennant' is unknown"),
    ],
)
def test_UX5_an_unknown_tenant_group_or_label_is_an_error(
    cluster: Cluster, labels: dict[str, str], field: str, message: str
) -> None:
    with pytest.raises(Invalid) as refusal:
        place(cluster, labels)
    assert refusal.value.field == field
    assert message in refusal.value.message
