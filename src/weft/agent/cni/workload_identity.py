"""Who is this: tenant, network and group of a workload, from labels in its request, or the defaults (contiv 8.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from weft.cni.request import Add
from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.desired.placement import GROUP_LABEL, NETWORK_LABEL, TENANT_LABEL
from weft.domain.errors import Invalid
from weft.domain.ids import DEFAULT_NETWORK, DEFAULT_TENANT, GroupName, NetworkName, TenantName, check_name
from weft.domain.model import PodIdentity


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a workload belongs."""

    tenant: TenantName
    network: NetworkName
    group: GroupName


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is known of a workload that is to be attached."""

    placement: Placement
    labels: Mapping[str, str]
    pod: PodIdentity | None = None


class Workloads(Protocol):
    """Whoever knows workloads."""

    async def describe(self, request: Add) -> Workload:
        """The workload of a request; `Invalid` names what is wrong, `Unavailable` means that nobody can say now."""
        ...


class PlainWorkloads:
    """Workloads that nobody runs for us: all that is known of them is in the request."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def describe(self, request: Add) -> Workload:
        labels = request.wishes.labels
        return Workload(placement=place(self._cluster, labels), labels=labels)


def place(cluster: Cluster, labels: Mapping[str, str]) -> Placement:
    """The place that the labels choose; a group alone also chooses its network. `Invalid` names what is wrong."""
    tenant = TenantName(_name(labels, TENANT_LABEL) or DEFAULT_TENANT)
    group = GroupName(_name(labels, GROUP_LABEL))
    network = _name(labels, NETWORK_LABEL)
    if not network and group:
        stored = cluster.get(kinds.GROUP, tenant, group)
        network = stored.value.network if stored else ""
    if not network:
        owner = cluster.get(kinds.TENANT, tenant)
        network = (owner.value.default_network if owner else "") or DEFAULT_NETWORK
    return Placement(tenant, NetworkName(network), group)


def _name(labels: Mapping[str, str], label: str) -> str:
    text = labels.get(label, "")
    try:
        return check_name(text, field=label) if text else ""
    except Invalid as error:
        raise Invalid(f"label {error.message}", field=label) from error
