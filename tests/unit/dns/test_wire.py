"""Queries are read and answers checked as dnspython does it, for any bytes (CVE-2025-23028)."""

from __future__ import annotations

import struct
from itertools import pairwise

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.dns.wire import Edns, Type, check_answer, labels_of, read_address_records, read_name, read_question
from weft.domain.errors import Malformed

labels = st.binary(min_size=1, max_size=63)
names = st.lists(labels, max_size=6).filter(lambda parts: sum(map(len, parts)) + len(parts) < 255)
text_names = st.lists(st.from_regex(r"[a-zA-Z0-9_-]{1,20}", fullmatch=True), min_size=1, max_size=6).map(".".join)


@given(names, st.integers(1, 65_535).filter(lambda kind: kind not in {41, 250}), st.booleans(), st.integers(0, 65_535))
def test_queries_of_dnspython_are_read(parts: list[bytes], kind: int, edns: bool, number: int) -> None:
    name = dns.name.Name([*parts, b""])
    query = dns.message.make_query(
        name, dns.rdatatype.RdataType.make(kind), use_edns=0 if edns else False, payload=1400, want_dnssec=edns
    )
    query.id = number
    question = read_question(query.to_wire())
    assert (question.id, question.type, question.cls) == (number, kind, 1)
    assert labels_of(question.name) == [part.lower() for part in parts]
    assert question.wire_question == (name.to_wire() or b"") + struct.pack("!HH", kind, 1)
    assert question.edns == (Edns(1400, 0, True) if edns else None)


@given(st.binary(max_size=600))
def test_any_bytes_are_read_or_malformed(data: bytes) -> None:
    try:
        question = read_question(data)
    except Malformed:
        return
    assert question.wire_question.lower().startswith(question.name)


@given(st.data())
def test_damaged_queries_are_read_only_if_dnspython_reads_the_same(data: st.DataObject) -> None:
    wire = bytearray(dns.message.make_query("web.example.org", "AAAA", use_edns=0).to_wire())
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(2, len(wire) - 1))] = data.draw(st.integers(0, 255))
    wire[2] &= 0x07  # the caller has seen that it is a question
    cut = bytes(wire[: data.draw(st.integers(len(wire) - 8, len(wire)))])
    try:
        question = read_question(cut)
    except Malformed:
        return
    try:
        expected = dns.message.from_wire(cut)
    except (dns.exception.DNSException, ValueError):
        return  # it looks into records that we only step over
    assert question.wire_question[:-4].lower() == expected.question[0].name.canonicalize().to_wire()
    assert question.type == expected.question[0].rdtype


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\0" * 11, id="short header"),
        pytest.param(struct.pack("!6H", 1, 0, 0, 0, 0, 0), id="no question"),
        pytest.param(struct.pack("!6H", 1, 0, 2, 0, 0, 0) + b"\1a\0\0\1\0\1" * 2, id="two questions"),
        pytest.param(struct.pack("!6H", 1, 0, 1, 0, 0, 0) + b"\1a\0\0\1", id="no class"),
        pytest.param(struct.pack("!6H", 1, 0, 1, 0, 0, 0) + b"\x05a", id="label beyond the end"),
        pytest.param(struct.pack("!6H", 1, 0, 1, 0, 0, 0) + b"\xc0\x0c\0\1\0\1", id="pointer to itself"),
        pytest.param(struct.pack("!6H", 1, 0, 1, 0, 0, 0) + b"\x3fa" * 5 + b"\0\0\1\0\1", id="endless labels"),
        pytest.param(struct.pack("!6H", 1, 0, 1, 0, 0, 0) + (b"\x3f" + b"a" * 63) * 4 + b"\0\0\1\0\1", id="256 bytes"),
        pytest.param(struct.pack("!6H", 1, 0, 1, 0, 0, 0) + b"\1a\0\0\1\0\1x", id="something behind it"),
        pytest.param(struct.pack("!6H", 1, 0, 1, 0, 0, 9) + b"\1a\0\0\1\0\1", id="records that are not there"),
        pytest.param(
            struct.pack("!6H", 1, 0, 1, 0, 0, 2) + b"\1a\0\0\1\0\1" + b"\0\0\x29\x04\0\0\0\0\0\0\0" * 2, id="two OPT"
        ),
        pytest.param(
            struct.pack("!6H", 1, 0, 1, 0, 0, 1) + b"\1a\0\0\1\0\1" + b"\1b\0\0\x29\x04\0\0\0\0\0\0\0", id="named OPT"
        ),
    ],
)
def test_a_malformed_query_is_rejected(damage: bytes) -> None:
    with pytest.raises(Malformed):
        read_question(damage)


def test_the_answer_size_is_512_bytes_without_edns_and_1232_at_most() -> None:
    for payload, max_size in ((0, 512), (100, 512), (1000, 1000), (4096, 1232)):
        query = dns.message.make_query("a", "A", use_edns=0 if payload else False, payload=payload)
        assert read_question(query.to_wire()).max_size == max_size


def test_meta_types() -> None:
    assert all(Type.is_meta(kind) for kind in (dns.rdatatype.ANY, dns.rdatatype.AXFR, dns.rdatatype.OPT, 250))
    assert not any(Type.is_meta(kind) for kind in (1, 5, 28, 33, 65, 257))


def answered(name: str) -> tuple[dns.message.Message, dns.message.Message]:
    query = dns.message.make_query(name, "A")
    answer = dns.message.make_response(query)
    answer.answer.append(dns.rrset.from_text(f"{name}.", 60, "IN", "A", "192.0.2.1"))
    return query, answer


@given(text_names, st.integers(0, 65_535))
def test_a_valid_answer_is_accepted(name: str, number: int) -> None:
    query, answer = answered(name)
    answer.id = number
    question = read_question(query.to_wire())
    assert check_answer(answer.to_wire(), msg_id=number, question=question) == 0


def test_forged_answers_are_rejected() -> None:
    """Kaminsky's lesson: number and question must be those that were sent, and the rest must be whole."""
    query, answer = answered("www.example.org")
    question, good = read_question(query.to_wire()), answer.to_wire()
    other = answered("www.example.net")[1]
    other.id = query.id
    for forged in (
        bytes([good[0] ^ 1]) + good[1:],
        other.to_wire(),
        query.to_wire(),
        good[:-1],
        good + b"\0",
        good[:7] + b"\7" + good[8:],
        b"",
    ):
        with pytest.raises(Malformed):
            check_answer(forged, msg_id=query.id, question=question)


@given(st.binary(max_size=300))
def test_any_answer_is_checked_or_malformed(tail: bytes) -> None:
    query, answer = answered("www.example.org")
    question = read_question(query.to_wire())
    head = answer.to_wire()[: 12 + len(question.wire_question)]
    for data in (tail, head + tail):
        try:
            check_answer(data, msg_id=query.id, question=question)
        except Malformed:
            continue


@given(st.lists(text_names, min_size=2, max_size=6), st.integers(1, 9))
def test_records_of_an_answer_are_read_as_dnspython_wrote_them(chain: list[str], number: int) -> None:
    """With pointers, as dnspython compresses: each name is an alias of the next, the last one has addresses."""
    query = dns.message.make_query(chain[0], "A")
    answer = dns.message.make_response(query)
    for one, other in pairwise(chain):
        answer.answer.append(dns.rrset.from_text(f"{one}.", 60, "IN", "CNAME", f"{other}."))
    answer.answer.append(dns.rrset.from_text(f"{chain[-1]}.", 60, "IN", "TXT", "passed over"))
    answer.answer.append(dns.rrset.from_text(f"{chain[-1]}.", 9, "IN", "A", f"192.0.2.{number}"))
    found = read_address_records(answer.to_wire(), read_question(query.to_wire()))
    names = [dns.name.from_text(name).canonicalize().to_wire() for name in chain]
    assert [(each.owner, each.data) for each in found[:-1]] == list(pairwise(names))
    assert found[-1] == (names[-1], Type.A, 9, bytes((192, 0, 2, number)))


@given(st.binary(max_size=300), st.integers(0, 310))
def test_any_compressed_name_ends(data: bytes, at: int) -> None:
    """Pointers in rings, beyond the end, or forward: there is an end, and dnspython sees the same or nothing."""
    try:
        name = read_name(data, at)
    except Malformed:
        return
    expected, _ = dns.name.from_wire(data, at)
    assert name == expected.canonicalize().to_wire()


@given(st.binary(max_size=200), st.integers(0, 5))
def test_records_are_read_only_from_checked_answers(tail: bytes, count: int) -> None:
    query, answer = answered("www.example.org")
    question = read_question(query.to_wire())
    wire = bytearray(answer.to_wire()[: 12 + len(question.wire_question)] + tail)
    wire[6:8] = count.to_bytes(2)
    try:
        check_answer(bytes(wire), msg_id=query.id, question=question)
        read_address_records(bytes(wire), question)
    except Malformed:
        return
