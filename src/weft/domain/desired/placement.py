"""The labels that choose a workload's tenant, network and group (contiv 8.2), and how defaults give way to them."""

from __future__ import annotations

from collections.abc import Mapping

from weft.domain.errors import Invalid

TENANT_LABEL = "io.contiv.tenant"
NETWORK_LABEL = "io.contiv.network"
GROUP_LABEL = "io.contiv.net-group"

PLACING_LABELS = (TENANT_LABEL, NETWORK_LABEL, GROUP_LABEL)


def placing_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Those of the labels that choose."""
    return {label: labels[label] for label in PLACING_LABELS if labels.get(label)}


def over_defaults(labels: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """What is chosen, by labels first and by defaults where they are silent.

    A default that belongs to something else than what was chosen does not count: who chooses another tenant has left
    the defaults' networks and groups behind, and a network and a group are chosen together.
    """
    chosen, left = placing_labels(labels), placing_labels(defaults)
    if chosen.get(TENANT_LABEL, left.get(TENANT_LABEL)) != left.get(TENANT_LABEL):
        return chosen
    if NETWORK_LABEL in chosen or GROUP_LABEL in chosen:
        left = {label: value for label, value in left.items() if label == TENANT_LABEL}
    return {**left, **chosen}


def bound_by(labels: Mapping[str, str], bonds: Mapping[str, str]) -> dict[str, str]:
    """What is chosen where an administrator has decided some of it; `Invalid` when a label says otherwise."""
    for label, value in placing_labels(bonds).items():
        if labels.get(label, value) != value:
            raise Invalid(
                f"label {label} is {value!r} by the network configuration: {labels[label]!r:.80} is refused",
                field=label,
            )
    return {**labels, **placing_labels(bonds)}
