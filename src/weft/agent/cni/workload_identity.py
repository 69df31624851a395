"""Workload identity: tenant, network and group of a container, by labels in its request or by default (contiv 8.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from weft.cni.errors import CniError
from weft.cni.request import Add
from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.desired.placement import GROUP_LABEL, NETWORK_LABEL, TENANT_LABEL, placement_labels
from weft.domain.errors import Invalid, WeftError
from weft.domain.ids import DEFAULT_NETWORK, DEFAULT_TENANT, GroupName, NetworkName, TenantName, check_name
from weft.domain.model import PodIdentity


@dataclass(frozen=True, slots=True)
class Placement:
    """The tenant, network and group of a workload; the group may be empty."""

    tenant: TenantName
    network: NetworkName
    group: GroupName


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The identity of a workload that is to be attached."""

    placement: Placement
    labels: Mapping[str, str]
    pod: PodIdentity | None = None


class Workloads(Protocol):
    """A source of workload identities."""

    async def describe(self, request: Add) -> Workload:
        """The workload of a request; `Invalid` names what is wrong, `Unavailable` that the source is unreachable."""
        ...

    def report_failure(self, request: Add, error: WeftError | CniError | asyncio.CancelledError) -> None:
        """Show users of the workload why its ADD has failed, where the source has a place for that."""
        ...


class PlainWorkloads:
    """Workloads without an orchestrator: their requests say all that is known of them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def describe(self, request: Add) -> Workload:
        labels = request.capabilities.labels
        return Workload(placement=place(self._cluster, labels), labels=labels)

    def report_failure(self, request: Add, error: WeftError | CniError | asyncio.CancelledError) -> None:
        """The runtime gets the error in the CNI answer; there is no other place to report it."""


def place(cluster: Cluster, labels: Mapping[str, str]) -> Placement:
    """The placement that labels select; a group alone also selects its network. `Invalid` names what is wrong."""
    labels = placement_labels(labels)
    tenant = TenantName(_name(labels, TENANT_LABEL) or DEFAULT_TENANT)
    owner = cluster.get(kinds.TENANT, tenant)
    if owner is None and TENANT_LABEL in labels:
        raise Invalid(
            f"tenant {tenant!r} does not exist: create it, or correct label {TENANT_LABEL}", field=TENANT_LABEL
        )
    group = GroupName(_name(labels, GROUP_LABEL))
    network = _name(labels, NETWORK_LABEL)
    if group:
        stored = cluster.get(kinds.GROUP, tenant, group)
        if stored is None:
            raise Invalid(
                f"group {group!r} of tenant {tenant!r} does not exist: create it, or correct label {GROUP_LABEL}",
                field=GROUP_LABEL,
            )
        # A network that the group is not in is reported by IPAM.
        network = network or stored.value.network
    if not network:
        network = (owner.value.default_network if owner else "") or DEFAULT_NETWORK
    return Placement(tenant, NetworkName(network), group)


def _name(labels: Mapping[str, str], label: str) -> str:
    # Checked before use: labels come from users, and the names become parts of store keys.
    text = labels.get(label, "")
    try:
        return check_name(text, field=label) if text else ""
    except Invalid as error:
        raise Invalid(f"label {error.message}", field=label) from error
