"""Whatever a server says: an object is read, or refused by an error that a watch knows to pass over."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.adapters.kubernetes.api import refusal
from weft.adapters.kubernetes.cluster_informers import read_namespace, read_service
from weft.adapters.kubernetes.objects import Pod
from weft.adapters.kubernetes.pods import facts_of
from weft.adapters.kubernetes.policies import read_policy
from weft.adapters.kubernetes.slices import read_endpoints, read_slice, read_slice_v1beta1
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


def read_pod(data: bytes) -> Value | None:
    facts_of(msgspec.json.decode(data, type=Pod))
    return None


@pytest.mark.parametrize(
    "read",
    [read_namespace, read_service, read_policy, read_slice, read_slice_v1beta1, read_endpoints, read_pod],
    ids=lambda read: read.__name__,
)
@given(data=DOCUMENTS)
def test_a_reader_gives_what_can_be_kept_or_refuses(read: Callable[[bytes], Value | None], data: bytes) -> None:
    try:
        document = read(data)
        if document is not None:
            check(document)
    except (msgspec.MsgspecError, WeftError, ValueError):
        return
    if document is not None:
        assert codec.decode(type(document), codec.encode(document)) == document


@given(status=st.integers(100, 599), body=DOCUMENTS)
def test_a_refusal_is_always_one_of_our_errors(status: int, body: bytes) -> None:
    assert isinstance(refusal(status, body), WeftError)
