"""Labels that select the tenant, network and group of a workload (contiv 8.2), and how they override defaults."""

from __future__ import annotations

from collections.abc import Mapping

from weft.domain.errors import Invalid

TENANT_LABEL = "io.contiv.tenant"
NETWORK_LABEL = "io.contiv.network"
GROUP_LABEL = "io.contiv.net-group"

PLACEMENT_LABELS = (TENANT_LABEL, NETWORK_LABEL, GROUP_LABEL)


def placement_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """The placement labels among the labels, without empty ones."""
    return {label: labels[label] for label in PLACEMENT_LABELS if labels.get(label)}


def with_defaults(labels: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """The placement by the labels, completed by defaults that fit to it."""
    chosen, inherited = placement_labels(labels), placement_labels(defaults)
    # Default networks and groups belong to the default tenant: in another tenant the names would mean something else.
    if chosen.get(TENANT_LABEL, inherited.get(TENANT_LABEL)) != inherited.get(TENANT_LABEL):
        return chosen
    # Network and group go together: a default group need not be in the chosen network.
    if NETWORK_LABEL in chosen or GROUP_LABEL in chosen:
        inherited = {label: value for label, value in inherited.items() if label == TENANT_LABEL}
    return {**inherited, **chosen}


def enforce_labels(labels: Mapping[str, str], enforced: Mapping[str, str]) -> dict[str, str]:
    """The labels with those that an administrator enforces; `Invalid` for a label that contradicts."""
    for label, value in placement_labels(enforced).items():
        if labels.get(label, value) != value:
            raise Invalid(
                f"label {label} is {value!r} by the network configuration: {labels[label]!r:.80} is refused",
                field=label,
            )
    return {**labels, **placement_labels(enforced)}
