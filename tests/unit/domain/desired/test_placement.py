"""K3: labels choose tenant, network and group; a namespace's labels are the defaults of its pods."""

from __future__ import annotations

import pytest

from weft.domain.desired.placement import (
    GROUP_LABEL,
    NETWORK_LABEL,
    TENANT_LABEL,
    enforce_labels,
    placement_labels,
    with_defaults,
)
from weft.domain.errors import Invalid

NAMES = {"t": TENANT_LABEL, "n": NETWORK_LABEL, "g": GROUP_LABEL}


def labels(text: str) -> dict[str, str]:
    """`t=blue n=web` as labels."""
    return {NAMES[key]: value for key, _, value in (pair.partition("=") for pair in text.split())}


@pytest.mark.parametrize(
    ("pod", "namespace", "chosen"),
    [
        ("", "", ""),
        ("", "t=blue n=net g=web", "t=blue n=net g=web"),
        ("t=red", "t=blue n=net g=web", "t=red"),
        ("t=blue", "t=blue n=net g=web", "t=blue n=net g=web"),
        ("n=other", "t=blue n=net g=web", "t=blue n=other"),
        ("g=db", "t=blue n=net g=web", "t=blue g=db"),
        ("t=red n=x g=y", "t=blue", "t=red n=x g=y"),
        ("t=red", "n=net", "t=red"),
        ("n=other", "", "n=other"),
    ],
)
def test_defaults_give_way(pod: str, namespace: str, chosen: str) -> None:
    both = {"app": "web", **labels(pod)}
    assert with_defaults(both, {"team": "a", **labels(namespace)}) == labels(chosen)


def test_what_the_network_configuration_says_binds() -> None:
    assert enforce_labels(labels("n=net"), labels("t=blue")) == labels("t=blue n=net")
    with pytest.raises(Invalid) as refusal:
        enforce_labels(labels("t=red"), labels("t=blue"))
    assert refusal.value.field == TENANT_LABEL


@pytest.mark.parametrize(
    ("label", "nearest"),
    [
        ("io.contiv.tennant", TENANT_LABEL),
        ("io.contiv.Tenant", TENANT_LABEL),
        ("IO.contiv.tenant", TENANT_LABEL),
        ("io.contiv/tenant", TENANT_LABEL),
        ("io-contiv.tenant", TENANT_LABEL),
        ("io.conitv.tenant", TENANT_LABEL),
        ("io.contiv.tenant ", TENANT_LABEL),
        ("io.contiv.group", GROUP_LABEL),
        ("io.contiv.netgroup", GROUP_LABEL),
        ("io.contiv.net", NETWORK_LABEL),
        ("io.contiv.", ""),
        ("io.contiv.colour", ""),
    ],
)
def test_UX5_a_misspelt_label_is_refused_with_the_nearest_valid_one(label: str, nearest: str) -> None:
    for read in (placement_labels, lambda given: with_defaults(given, {}), lambda given: with_defaults({}, given)):
        with pytest.raises(Invalid) as refusal:
            read({"app": "web", label: "blue"})
        assert refusal.value.field == label
        assert repr(label) in refusal.value.message
        assert nearest in refusal.value.message
    with pytest.raises(Invalid):
        enforce_labels({}, {label: "blue"})


def test_UX5_an_empty_label_is_refused() -> None:
    """`io.contiv.tenant=$TENANT` with an unset variable must not mean the default tenant."""
    for label in NAMES.values():
        with pytest.raises(Invalid, match=f"{label} is empty"):
            placement_labels({label: ""})


def test_UX5_labels_of_others_are_left_alone() -> None:
    others = {
        "app": "",
        "io.cilium.network": "x",
        "io.kubernetes.pod.name": "p",
        "tenant": "x",
        "io.calico.tenant": "x",
    }
    assert placement_labels({**others, TENANT_LABEL: "blue"}) == {TENANT_LABEL: "blue"}
