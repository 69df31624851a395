"""Labels that select the tenant, network and group of a workload (contiv 8.2), and how they override defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weft.domain.errors import Invalid
from weft.domain.ids import DEFAULT_TENANT, TenantName, check_name

TENANT_LABEL = "io.contiv.tenant"
NETWORK_LABEL = "io.contiv.network"
GROUP_LABEL = "io.contiv.net-group"

PLACEMENT_LABELS = (TENANT_LABEL, NETWORK_LABEL, GROUP_LABEL)


# Contiv's prefix in any spelling. A label that has it and is none of ours is a typing error.
_PREFIX = re.compile(r"io[._/-]?contiv", re.IGNORECASE)
# The least similarity to a placement label at which another `io.` label is taken for a misspelt one.
_SIMILAR = 0.9


def placement_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """The placement labels among the labels; `Invalid` for a misspelt or empty one.

    Ignoring such a label would put the workload into the default tenant, or into no group and so outside its policies.
    """
    for label in labels:
        if label not in PLACEMENT_LABELS and label[:2].lower() == "io":
            _refuse_misspelt(label)
    chosen = {label: labels[label] for label in PLACEMENT_LABELS if label in labels}
    for label, value in chosen.items():
        if not value:
            raise Invalid(f"label {label} is empty: give a name or remove it", field=label)
    return chosen


def _refuse_misspelt(label: str) -> None:
    import difflib  # noqa: PLC0415 - slow to import, and hardly any workload has such a label

    is_ours = _PREFIX.match(label) is not None
    near = difflib.get_close_matches(label.lower(), PLACEMENT_LABELS, n=1, cutoff=0.6 if is_ours else _SIMILAR)
    if is_ours or near:
        suggestion = f"did you mean {near[0]}? " if near else ""
        raise Invalid(
            f"label {label!r:.80} is unknown: {suggestion}valid are {', '.join(PLACEMENT_LABELS)}", field=label
        )


def tenant_of_namespace(labels: Mapping[str, str]) -> TenantName:
    """The tenant of a Namespace's Services; `Invalid` when its label is empty or no name."""
    if TENANT_LABEL not in labels:
        return DEFAULT_TENANT
    return TenantName(check_name(labels[TENANT_LABEL], field=TENANT_LABEL))


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
