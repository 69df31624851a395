"""Every tenant has its own NodePort VIPs, the same on every node."""

from __future__ import annotations

from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.host_access.nodeport_vips import nodeport_vips
from weft.domain.ids import TenantName


def cluster_of(*names: str) -> Cluster:
    cluster = Cluster()
    for name in names:
        cluster.put(kinds.TENANT.store_key(name), codec.encode(model.Tenant(name=TenantName(name))), 1)
    return cluster


def test_no_two_tenants_have_the_same_vip() -> None:
    """With so many tenants some hashes collide."""
    names = [f"tenant{number}" for number in range(300)]
    vips = nodeport_vips(cluster_of(*names))
    assert len({address for pair in vips.values() for address in pair}) == 2 * len(names)
    assert vips == nodeport_vips(cluster_of(*reversed(names)))


def test_vips_are_private_addresses() -> None:
    v4, v6 = nodeport_vips(cluster_of("blue"))[TenantName("blue")]
    assert str(v4).startswith(("172.19.24", "172.19.25"))
    assert str(v6).startswith("fd77:6566:7400:2:")
