"""Decoders return a storable object or raise an error that the reflector handles, whatever the server sends."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.adapters.kubernetes.api import error_from_status
from weft.adapters.kubernetes.cluster_informers import decode_namespace, decode_service
from weft.adapters.kubernetes.objects import Pod
from weft.adapters.kubernetes.pods import pod_info
from weft.adapters.kubernetes.policies import decode_policy
from weft.adapters.kubernetes.slices import decode_endpoints, decode_slice, decode_slice_v1beta1
from weft.domain import codec
from weft.domain.errors import WeftError
from weft.domain.model import Value
from weft.domain.validation import check

WORDS = st.sampled_from([
    "metadata", "name", "namespace", "labels", "annotations", "spec", "status", "podSelector", "matchLabels",
    "matchExpressions", "key", "operator", "values", "ingress", "egress", "from", "to", "ports", "port", "protocol",
    "ipBlock", "cidr", "except", "policyTypes", "clusterIP", "clusterIPs", "endpoints", "addresses", "addressType",
    "conditions", "ready", "topology", "subsets", "containers", "containerPort", "kubernetes.io/service-name",
])  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8),
    st.sampled_from(["IPv4", "IPv6", "TCP", "Ingress", "10.0.0.0/8", "10.0.0.1", "In", "None", "x"]),
)  # fmt: skip
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5))
NAMED = st.fixed_dictionaries({"metadata": st.just({"name": "x", "namespace": "ns"})}, optional={
    "spec": TREES, "status": TREES, "addressType": LEAVES, "endpoints": TREES, "ports": TREES, "subsets": TREES,
})  # fmt: skip
DOCUMENTS = st.one_of(st.binary(max_size=40), st.one_of(TREES, NAMED).map(msgspec.json.encode))


def decode_pod(data: bytes) -> Value | None:
    pod_info(msgspec.json.decode(data, type=Pod))
    return None


@pytest.mark.parametrize(
    "decode",
    [decode_namespace, decode_service, decode_policy, decode_slice, decode_slice_v1beta1, decode_endpoints, decode_pod],
    ids=lambda decode: decode.__name__,
)
@given(data=DOCUMENTS)
def test_a_decoder_returns_a_storable_object_or_rejects_it(
    decode: Callable[[bytes], Value | None], data: bytes
) -> None:
    try:
        document = decode(data)
        if document is not None:
            check(document)
    except (msgspec.MsgspecError, WeftError, ValueError):
        return
    if document is not None:
        assert codec.decode(type(document), codec.encode(document)) == document


@given(status=st.integers(100, 599), body=DOCUMENTS)
def test_any_status_maps_to_a_weft_error(status: int, body: bytes) -> None:
    assert isinstance(error_from_status(status, body), WeftError)
