"""`CNI_ARGS` as real runtimes send them."""

from __future__ import annotations

import random
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cni.arguments import parse_arguments, parse_mac
from weft.cni.errors import CniError, Code

KUBELET = (
    "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=hp;K8S_POD_INFRA_CONTAINER_ID=9f86d081884c7d65;"
    "K8S_POD_UID=0a4c5b52-6d3e-4a57-9a1c-3e0f3bb1f3d2"
)
PODMAN = "IgnoreUnknown=1;K8S_POD_NAME=pc2;MAC=02:11:22:33:44:55;IP=10.87.0.77"


def test_the_order_of_keys_does_not_matter() -> None:
    """cni 5: `CNI_ARGS` keys come in random order."""
    pairs = KUBELET.split(";")
    expected = parse_arguments(KUBELET, refuse_unknown=True)
    for seed in range(20):
        random.Random(seed).shuffle(pairs)
        assert parse_arguments(";".join(pairs), refuse_unknown=True) == expected
    assert (expected.pod_namespace, expected.pod_name) == ("default", "hp")
    assert (expected.pod_sandbox, expected.pod_uid) == ("9f86d081884c7d65", "0a4c5b52-6d3e-4a57-9a1c-3e0f3bb1f3d2")


def test_podman_asks_for_addresses_in_arguments() -> None:
    arguments = parse_arguments(PODMAN, refuse_unknown=True)
    assert (arguments.addresses, arguments.mac) == ((ip_address("10.87.0.77"),), "02:11:22:33:44:55")


def test_absent_arguments_are_fine() -> None:
    """C-016."""
    arguments = parse_arguments("", refuse_unknown=True)
    assert (arguments.pod_name, arguments.addresses, arguments.mac, dict(arguments.others)) == ("", (), "", {})


@pytest.mark.parametrize("text", ["A", "A=1;", ";", "A=1;;IgnoreUnknown=1", "=1", "A=1;A=2;IgnoreUnknown=1"])
def test_a_malformed_pair_is_code_4(text: str) -> None:
    """C-016; a key named twice would make the pod's identity a matter of luck."""
    with pytest.raises(CniError) as refused:
        parse_arguments(text, refuse_unknown=False)
    assert refused.value.code == Code.BAD_ENVIRONMENT
    assert "CNI_ARGS" in refused.value.message


@pytest.mark.parametrize("asked", ["", ";IgnoreUnknown=0", ";IgnoreUnknown=false", ";IgnoreUnknown="])
def test_unknown_keys_are_refused_by_name(asked: str) -> None:
    """C-016."""
    with pytest.raises(CniError, match="CNI_ARGS has unknown keys: COLOUR, SHAPE") as refused:
        parse_arguments("SHAPE=round;COLOUR=blue" + asked, refuse_unknown=True)
    assert refused.value.code == Code.BAD_ENVIRONMENT


@pytest.mark.parametrize("asked", ["1", "true", "True", "TRUE"])
def test_unknown_keys_are_kept_when_they_may_be_ignored(asked: str) -> None:
    """C-016; Nomad describes its job this way."""
    arguments = parse_arguments(f"NOMAD_JOB_ID=web=1;IgnoreUnknown={asked}", refuse_unknown=True)
    assert dict(arguments.others) == {"NOMAD_JOB_ID": "web=1"}


def test_our_labels_are_known() -> None:
    arguments = parse_arguments("io.contiv.tenant=blue;io.contiv.net-group=web", refuse_unknown=True)
    assert dict(arguments.labels) == {"io.contiv.tenant": "blue", "io.contiv.net-group": "web"}


@pytest.mark.parametrize(
    "text", ["K8S_POD_NAME=../x", "K8S_POD_NAMESPACE=a/b", "K8S_POD_UID=a b", "IP=here", "MAC=02:11", "IP=10.0.0.1,x"]
)
def test_values_are_matched_by_pattern(text: str) -> None:
    """They become paths of the API server and keys of the store."""
    with pytest.raises(CniError) as refused:
        parse_arguments(text, refuse_unknown=True)
    assert refused.value.code == Code.BAD_ENVIRONMENT


@pytest.mark.parametrize(
    ("text", "mac"), [("02-AA-BB-CC-DD-0E", "02:aa:bb:cc:dd:0e"), ("fe:00:00:00:00:01", "fe:00:00:00:00:01"), ("", "")]
)
def test_hardware_addresses_have_one_spelling(text: str, mac: str) -> None:
    assert parse_mac(text) == mac


@pytest.mark.parametrize("text", ["01:00:5e:00:00:01", "00:00:00:00:00:00", "02:00:00:00:00", "x", "0200.0000.0001"])
def test_what_no_single_interface_can_have_is_no_hardware_address(text: str) -> None:
    with pytest.raises(ValueError, match="not the hardware address"):
        parse_mac(text)


@given(text=st.text())
def test_any_text_is_arguments_or_code_4(text: str) -> None:
    try:
        parse_arguments(text, refuse_unknown=True)
    except CniError as refused:
        assert refused.code == Code.BAD_ENVIRONMENT


def test_UX5_labels_in_another_case_are_not_ignored() -> None:
    """With IgnoreUnknown, which kubelet always sends, a misspelt label would mean the default tenant."""
    arguments = parse_arguments("IgnoreUnknown=1;IO.Contiv.tenant=blue;io_contiv.tenant=red", refuse_unknown=True)
    assert dict(arguments.labels) == {"IO.Contiv.tenant": "blue", "io_contiv.tenant": "red"}
