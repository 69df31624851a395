"""dnspython reads what we encode."""

from __future__ import annotations

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.rcode
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.dns.encode import (
    adapt_answer,
    encode_answer,
    encode_error,
    encode_name,
    encode_question,
    encode_record,
    srv_target,
    with_owner,
)
from weft.dns.wire import AA, RD, Rcode, read_question
from weft.domain.dns.names import Rank, Record, RecordType
from weft.domain.errors import Invalid

text_labels = st.from_regex(r"[a-zA-Z0-9_-]{1,30}", fullmatch=True)
text_names = st.lists(text_labels, min_size=1, max_size=6).map(".".join)


@given(text_names)
def test_names_are_encoded_in_lower_case(name: str) -> None:
    assert encode_name(name) == dns.name.from_text(name).canonicalize().to_wire()


@pytest.mark.parametrize("name", ["a..b", ".a", "a.", "x" * 64, ".".join(["x" * 63] * 4)])
def test_an_invalid_name_is_rejected(name: str) -> None:
    with pytest.raises(Invalid):
        encode_name(name)


@pytest.mark.parametrize(
    ("kind", "data", "shown"),
    [
        ("A", "192.0.2.1", "192.0.2.1"),
        ("AAAA", "2001:db8::1", "2001:db8::1"),
        ("PTR", "web.example", "web.example."),
        ("SRV", "0 100 80 web.example", "0 100 80 web.example."),
    ],
)
def test_records_of_each_type(kind: RecordType, data: str, shown: str) -> None:
    query = dns.message.make_query("Name.Example", kind)
    record = encode_record(Record("name.example", kind, data, Rank.GROUP), ttl=30)
    answer = dns.message.from_wire(encode_answer(read_question(query.to_wire()), answers=(record,), max_size=512))
    (rrset,) = answer.answer
    assert (rrset.name, rrset.ttl, rrset[0].to_text()) == (dns.name.from_text("name.example"), 30, shown)


@pytest.mark.parametrize(
    ("kind", "data"),
    [("A", "::1"), ("AAAA", "1.2.3.4"), ("A", "x"), ("SRV", "1 2 3"), ("SRV", "0 0 70000 a"), ("PTR", "a..b")],
)
def test_data_that_does_not_fit_the_type_is_rejected(kind: RecordType, data: str) -> None:
    with pytest.raises(Invalid):
        encode_record(Record("a", kind, data, Rank.GROUP), ttl=1)


def test_srv_target() -> None:
    record = encode_record(Record("_http._tcp.a", "SRV", "0 100 80 web.a", Rank.CLUSTER), ttl=1)
    assert srv_target(record) == encode_name("web.a")


@given(st.integers(0, 200), st.integers(12, 4096), st.booleans())
def test_an_answer_always_fits_and_has_tc_set_when_truncated(count: int, size: int, edns: bool) -> None:
    query = dns.message.make_query("group.example", "A", use_edns=0 if edns else False, payload=size)
    question = read_question(query.to_wire())
    records = tuple(
        encode_record(Record("group.example", "A", f"10.0.{number >> 8}.{number & 255}", Rank.GROUP), ttl=9)
        for number in range(count)
    )
    extra = with_owner(encode_name("other.example"), encode_record(Record("x", "A", "10.9.9.9", Rank.GROUP), ttl=9))
    wire = encode_answer(question, flags=AA, answers=records, additional=(extra,), max_size=question.max_size)
    assert len(wire) <= question.max_size
    answer = dns.message.from_wire(wire)
    answered = len(answer.answer[0]) if answer.answer else 0
    assert bool(answer.flags & dns.flags.TC) == (answered < count)
    assert answered == count or (not answer.additional and question.max_size - len(wire) < len(records[0]))
    assert (answer.edns == 0) == edns
    assert answer.flags & dns.flags.RA
    assert answer.flags & dns.flags.AA


def test_rcodes_above_15_are_in_the_opt_record() -> None:
    query = dns.message.make_query("a", "A", use_edns=0)
    answer = dns.message.from_wire(encode_answer(read_question(query.to_wire()), code=Rcode.BADVERS, max_size=512))
    assert answer.rcode() == dns.rcode.BADVERS


def test_an_error_needs_no_readable_question() -> None:
    answer = dns.message.from_wire(encode_error(b"\x12\x34\x29\0" + bytes(20), Rcode.NOTIMP))
    assert (answer.id, answer.rcode(), answer.opcode()) == (0x1234, dns.rcode.NOTIMP, 5)


def test_a_forwarded_query_has_nothing_else_of_the_clients() -> None:
    query = dns.message.make_query("WWW.example.org", "A", use_edns=0, payload=4096, want_dnssec=True)
    query.use_edns(0, dns.flags.DO, 4096, options=[dns.edns.GenericOption(dns.edns.OptionType.COOKIE, b"cookie!!")])
    question = read_question(query.to_wire())
    sent = dns.message.from_wire(encode_question(question, msg_id=77))
    assert (sent.id, sent.flags, sent.payload, sent.options) == (77, RD, 1232, ())
    assert sent.question[0].to_text() == "WWW.example.org. IN A"
    assert sent.ednsflags & dns.flags.DO


def test_an_answer_is_adapted_to_the_clients_id_and_case() -> None:
    sent = dns.message.make_query("www.example.org", "A")
    own = dns.message.make_query("wWw.eXample.org", "A")
    answer = dns.message.make_response(sent)
    answer.answer.append(dns.rrset.from_text("www.example.org.", 60, "IN", "A", "192.0.2.1"))
    adapted = adapt_answer(answer.to_wire(), read_question(own.to_wire()))
    assert own.is_response(dns.message.from_wire(adapted))
    assert b"\x03wWw\x07eXample" in adapted
