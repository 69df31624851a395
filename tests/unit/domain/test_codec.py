"""Documents as they are stored, and input as it comes from outside."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain import codec, kinds, model
from weft.domain.errors import Invalid, Malformed, Unavailable
from weft.domain.ids import TenantName

STORED: list[type[model.Value]] = [*(kind.type for kind in kinds.ALL), model.Claim, model.Block]


@st.composite
def values(draw: st.DrawFn) -> model.Value:
    """Any value of any stored type, sensible or not: the codec does not judge."""
    kind = draw(st.sampled_from(STORED))
    fields = [field for field in msgspec.structs.fields(kind) if field.required or draw(st.booleans())]
    return kind(**{field.name: draw(_member(field.type)) for field in fields})


def _member(kind: Any) -> st.SearchStrategy[Any]:
    return _any_of(msgspec.inspect.type_info(kind))


def _any_of(found: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Texts with everything JSON must escape, numbers of any size, and what is nested."""
    match found:
        case msgspec.inspect.IntType():
            return st.integers(-(1 << 62), 1 << 62)
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.LiteralType(values=words):
            return st.sampled_from(words)
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(_any_of(item), max_size=4).map(tuple)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_any_of(key), _any_of(value), max_size=4)
        case msgspec.inspect.UnionType(types=kinds_of):
            return st.one_of(*map(_any_of, kinds_of))
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.StructType(cls=kind, fields=fields):
            return st.builds(kind, **{field.name: _any_of(field.type) for field in fields})
    assert isinstance(found, msgspec.inspect.StrType)
    return st.text(max_size=20)


@given(values())
def test_every_value_reads_back_from_its_document(value: model.Value) -> None:
    assert codec.decode(type(value), codec.encode(value)) == value


@given(values())
def test_a_document_says_its_version(value: model.Value) -> None:
    assert msgspec.json.decode(codec.encode(value))["v"] == codec.VERSION


@given(values())
def test_the_members_shown_are_plain_and_not_zero(value: model.Value) -> None:
    shown = codec.members(value)
    assert all(shown.values())
    assert msgspec.json.decode(msgspec.json.encode(shown)).keys() == shown.keys()


def test_meaningful_defaults_are_shown() -> None:
    rule = codec.decode_input(
        model.Rule, b'{"tenantName":"t","policyName":"p","ruleId":"1","direction":"in","action":"deny"}'
    )
    assert codec.members(rule)["priority"] == 1
    assert "port" not in codec.members(rule)
    network = codec.decode_input(
        model.Network, b'{"tenantName":"t","networkName":"n","encap":"vlan","subnet":"10.1.1.0/24"}'
    )
    assert codec.members(network)["nwType"] == "data"


class TestVersions:
    def document(self, version: int, **members: object) -> bytes:
        return msgspec.json.encode({"v": version, "o": members})

    def test_a_newer_document_is_refused(self) -> None:
        """Also one that we could read: it may mean something else."""
        for members in ({"tenantName": "t1"}, {"tenantName": "t1", "colour": "red"}):
            with pytest.raises(Unavailable, match="upgrade"):
                codec.decode(model.Tenant, self.document(codec.VERSION + 1, **members))

    def test_an_older_document_is_brought_up_to_date(self) -> None:
        def rename(members: dict[str, object]) -> dict[str, object]:
            return {"tenantName": members["name"]}

        old = self.document(codec.VERSION - 1, name="t1")
        upgrades: dict[tuple[str, int], codec.Upgrade] = {("Tenant", codec.VERSION - 1): rename}
        assert codec.decode(model.Tenant, old, upgrades=upgrades) == model.Tenant(name=TenantName("t1"))
        with pytest.raises(Malformed):
            codec.decode(model.Tenant, old)

    def test_an_older_document_of_a_kind_that_never_changed_is_read_as_it_is(self) -> None:
        old = self.document(codec.VERSION - 1, tenantName="t1")
        assert codec.decode(model.Tenant, old).name == "t1"

    @pytest.mark.parametrize("version", [-1, -(10**15)])
    def test_a_version_that_never_was_is_refused_at_once(self, version: int) -> None:
        with pytest.raises(Malformed):
            codec.decode(model.Tenant, self.document(version, tenantName="t1"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b'{"v":1}',
        b'{"v":"1","o":{"tenantName":"t"}}',
        b'{"v":1,"o":{}}',
        b'{"v":1,"o":{"tenantName":5}}',
        b'{"v":1,"o":{"tenantName":"t","colour":1}}',
        b'{"v":1,"o":{"tenantName":"\xff"}}',
        b'{"v":1,"o":{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}}",
    ],
    ids=lambda data: repr(data[:40]),
)
def test_what_is_no_document_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        codec.decode(model.Tenant, data)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_document_or_malformed(data: bytes) -> None:
    for kind in STORED:
        with pytest.raises((Malformed, Unavailable)):
            codec.decode(kind, data)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"tenantName":"t","policyName":"p","ruleId":"1","direction":"in"}', "action"),
        (b'{"tenantName":"t","policyName":"p","ruleId":"1","direction":"x","action":"deny"}', "direction"),
        (b'{"tenantName":"t","policyName":"p","ruleId":1,"direction":"in","action":"deny"}', "ruleId"),
        (b'{"tenantName":"t","colour":1}', "colour"),
    ],
)
def test_input_is_refused_with_the_member_at_fault(body: bytes, field: str) -> None:
    with pytest.raises(Invalid) as caught:
        codec.decode_input(model.Rule, body)
    assert type(caught.value) is Invalid
    assert caught.value.field == field
    with pytest.raises(Invalid) as caught:
        codec.convert_input(model.Rule, msgspec.json.decode(body))
    assert caught.value.field == field


def test_the_place_in_a_list_is_named() -> None:
    members = {"tenantName": "t", "serviceName": "s", "networkName": "n", "ports": ["80:80:TCP", 7]}
    with pytest.raises(Invalid) as caught:
        codec.convert_input(model.Service, members)
    assert caught.value.field == "ports[1]"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"tenantName":"\xff"}'])
def test_input_that_is_no_json_is_malformed(body: bytes) -> None:
    with pytest.raises(Malformed):
        codec.decode_input(model.Tenant, body)
