"""K3: labels choose tenant, network and group; defaults where they are silent."""

from __future__ import annotations

import pytest

from weft.agent.cni.workload_identity import Placement, place
from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.placement import GROUP_LABEL, NETWORK_LABEL, TENANT_LABEL
from weft.domain.errors import Invalid
from weft.domain.ids import GroupName, NetworkName, TenantName


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    blue = model.Tenant(name=TenantName("blue"), default_network="usual")
    web = model.Group(tenant=TenantName("blue"), name=GroupName("web"), network=NetworkName("web-net"))
    cluster.put(kinds.TENANT.store_key("blue"), codec.encode(blue), 1)
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
        ({TENANT_LABEL: "nobody", GROUP_LABEL: "none"}, ("nobody", "default-net", "none")),
    ],
)
def test_labels_choose(cluster: Cluster, labels: dict[str, str], expected: tuple[str, str, str]) -> None:
    tenant, network, group = expected
    assert place(cluster, labels) == Placement(TenantName(tenant), NetworkName(network), GroupName(group))


def test_a_label_that_is_no_name_is_refused_by_name(cluster: Cluster) -> None:
    with pytest.raises(Invalid) as refusal:
        place(cluster, {TENANT_LABEL: "../etc"})
    assert refusal.value.field == TENANT_LABEL
