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
    """Any value of any stored type, sensible or not: the codec does not validate."""
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


@given(values(), st.dictionaries(st.text(max_size=9).map("newer-{}".format), st.integers() | st.text(max_size=9)))
def test_every_value_is_read_and_written_among_members_of_a_newer_weft(
    value: model.Value, unknown: dict[str, object]
) -> None:
    assert codec.read(type(value), codec.with_unknown(codec.encode(value), unknown)) == (value, unknown)


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
        assert codec.read(model.Tenant, old, upgrades=upgrades).value == model.Tenant(name=TenantName("t1"))
        with pytest.raises(Malformed):
            codec.decode(model.Tenant, old)

    def test_an_older_document_of_a_kind_that_never_changed_is_read_as_it_is(self) -> None:
        old = self.document(codec.VERSION - 1, tenantName="t1")
        assert codec.decode(model.Tenant, old).name == "t1"

    def test_members_of_a_newer_weft_are_kept_aside(self) -> None:
        """Read without them, and written again with them: a neighbour of a newer version loses nothing by us."""
        newer = self.document(codec.VERSION, tenantName="t1", colour={"name": "red"}, defaultNetwork="n1")
        read = codec.read(model.Tenant, newer)
        assert read.value == model.Tenant(name=TenantName("t1"), default_network="n1")
        assert read.unknown == {"colour": {"name": "red"}}
        changed = msgspec.structs.replace(read.value, default_network="n2")
        again = codec.with_unknown(codec.encode(changed), read.unknown)
        assert codec.read(model.Tenant, again) == (changed, read.unknown)
        assert msgspec.json.decode(again)["o"]["colour"] == {"name": "red"}

    def test_a_member_unknown_in_what_is_nested_is_refused(self) -> None:
        """Where it belongs when the rest is written again, is unknown."""
        network = {"tenantName": "t", "networkName": "n", "encap": "vlan", "subnet": "10.1.1.0/24"}
        with pytest.raises(Malformed, match="colour"):
            codec.decode(model.Network, self.document(codec.VERSION, **network, tags={"vlan": 1, "colour": 1}))

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
        b'{"v":1,"o":{"colour":1}}',
        b'{"v":1,"o":{"tenantName":5,"colour":1}}',
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


@pytest.mark.parametrize(
    ("member", "choices"), [("encap", "'vlan', 'vxlan'"), ("nwType", "'data', 'infra'"), ("subnet", None)]
)
def test_an_invalid_choice_is_reported_with_the_valid_ones(member: str, choices: str | None) -> None:
    members = {"tenantName": "t", "networkName": "n", "encap": "vlan", "subnet": "10.1.1.0/24"}
    with pytest.raises(Invalid) as refused:
        codec.convert_input(model.Network, members | {member: "gre" if choices else 1})
    assert refused.value.field == member
    assert (f"{member}: 'gre' is not one of {choices}" == refused.value.message) is (choices is not None)
