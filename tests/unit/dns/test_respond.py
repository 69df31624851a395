"""Questions and answers of one tenant, judged by dnspython (contiv 7.14, R4, R10)."""

from __future__ import annotations

import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.dns.respond import Responder, Statistics
from weft.dns.table import Table
from weft.dns.upstream_query import Outside
from weft.dns.wire import read_question
from weft.domain.addresses import parse_address
from weft.domain.dns.cluster_names import Backend, ServicePort, external_service_entry, headless_service_entry
from weft.domain.dns.names import Entry, Rank, Record, Zone, both_ways

CLIENT = "::ffff:10.1.0.9"
MEMBERS = 30


def zone() -> Zone:
    web1 = (parse_address("10.1.0.5", field="a"), parse_address("fd00::5", field="a"))
    backends = [Backend(parse_address(f"10.1.1.{number}", field="a")) for number in range(100)]
    ports = [ServicePort("http", "TCP", 80)]
    entries = {
        "web1": Entry(both_ways("web1", web1, rank=Rank.WORKLOAD)),
        "shut": Entry((), dns_egress_denied=("10.1.0.66", "fd00::66")),
        "db": headless_service_entry("ns", "db", backends=backends, ports=ports, domain="cluster.local"),
        "tiny": headless_service_entry("ns", "tiny", backends=backends[:2], ports=ports, domain="cluster.local"),
        "huge": Entry(
            tuple(Record("huge.cluster.local", "A", f"10.1.{n >> 8}.{n & 255}", Rank.CLUSTER) for n in range(600))
        ),
        "out": external_service_entry("ns", "out", target="www.Example.org.", domain="cluster.local"),
        "alias": external_service_entry("ns", "alias", target="tiny.ns.svc.cluster.local", domain="cluster.local"),
        "lost": external_service_entry("ns", "lost", target="nobody", domain="cluster.local"),
        "ring": external_service_entry("ns", "ring", target="ring.ns.svc.cluster.local", domain="cluster.local"),
        "dotted": Entry((Record("web.blue", "A", "10.1.0.7", Rank.GROUP),)),
    }
    for number in range(MEMBERS):
        entries[f"member{number}"] = Entry((Record("web", "A", f"10.1.2.{number}", Rank.GROUP),))
    return Zone(entries, ("10.1.0.0/16", "fd00::/64"))


TABLE = Table(ttl=30)
TABLE.replace(zone())


@pytest.fixture
def responder() -> Responder:
    return Responder(TABLE, domain="cluster.local", statistics=Statistics())


def answer(
    responder: Responder, asked: dns.message.Message, *, client: str = CLIENT, over_tcp: bool = False
) -> dns.message.Message:
    """The answer, which must be one to the question as it came, and tell the same with and without EDNS."""
    wire = responder.answer(asked.to_wire(), client=client, over_tcp=over_tcp)
    assert isinstance(wire, bytes)
    read = dns.message.from_wire(wire)
    assert asked.is_response(read)
    assert read.question[0].name.to_wire() == asked.question[0].name.to_wire(), "the case of letters is kept"
    assert (read.edns >= 0) == (asked.edns >= 0)
    return read


def ask(responder: Responder, name: str, kind: str = "A", *, client: str = CLIENT) -> dns.message.Message:
    return answer(responder, dns.message.make_query(name, kind), client=client)


def told(message: dns.message.Message) -> list[str]:
    return sorted(record.to_text() for rrset in message.answer for record in rrset)


def test_a_container_forth_and_back_r4(responder: Responder) -> None:
    assert told(ask(responder, "web1")) == ["10.1.0.5"]
    assert told(ask(responder, "web1", "AAAA")) == ["fd00::5"]
    assert told(ask(responder, "5.0.1.10.in-addr.arpa", "PTR")) == ["web1."]
    assert told(ask(responder, f"5{'.0' * 27}.0.0.d.f.ip6.arpa", "PTR")) == ["web1."]


@given(st.lists(st.booleans(), min_size=4, max_size=4))
def test_letters_of_any_case_are_the_same_and_are_sent_back_as_they_came(upper: list[bool]) -> None:
    responder = Responder(TABLE, domain="cluster.local", statistics=Statistics())
    name = "".join(letter.upper() if up else letter for letter, up in zip("web1", upper, strict=True))
    assert told(ask(responder, name)) == ["10.1.0.5"]
    reply = ask(responder, f"{name}.Cluster.Local")
    assert reply.rcode() == dns.rcode.NXDOMAIN


@pytest.mark.parametrize("edns", [False, 0])
def test_a_group_is_told_ten_at_a_time_and_in_turns_r4(responder: Responder, edns: int) -> None:
    seen: set[str] = set()
    orders: set[tuple[str, ...]] = set()
    for _ in range(200):
        reply = answer(responder, dns.message.make_query("web", "A", use_edns=edns))
        assert len(reply.answer[0]) == 10
        orders.add(tuple(record.to_text() for record in reply.answer[0]))
        seen |= set(told(reply))
    assert len(seen) == MEMBERS
    assert len(orders) > 100


def test_answers_are_authoritative_and_offer_recursion(responder: Responder) -> None:
    for name in ("web1", "nobody"):
        reply = ask(responder, name)
        assert reply.flags & dns.flags.AA
        assert reply.flags & dns.flags.RA
    assert ask(responder, "web1").answer[0].ttl == 30


def test_what_is_not_there_is_told_from_what_has_no_such_record(responder: Responder) -> None:
    for name, kind, code in (
        ("nobody", "A", dns.rcode.NXDOMAIN),
        ("web1", "HTTPS", dns.rcode.NOERROR),
        ("web", "AAAA", dns.rcode.NOERROR),
        ("web.blue", "MX", dns.rcode.NOERROR),
        ("blue", "A", dns.rcode.NOERROR),
        ("nobody.ns.svc.cluster.local", "A", dns.rcode.NXDOMAIN),
        ("ns.svc.cluster.local", "A", dns.rcode.NOERROR),
        ("cluster.local", "SOA", dns.rcode.NOERROR),
        ("9.9.1.10.in-addr.arpa", "PTR", dns.rcode.NXDOMAIN),
    ):
        reply = ask(responder, name, kind)
        assert (name, reply.rcode(), told(reply)) == (name, code, [])
        (soa,) = reply.authority
        assert dns.name.from_text(name).is_subdomain(soa.name)
        assert soa[0].minimum == soa.ttl == 5


@pytest.mark.parametrize(
    "name",
    [
        "nobody",
        "web2",
        "x.cluster.local",
        "a.b.svc.CLUSTER.local",
        "1.0.1.10.in-addr.arpa",
        "1.10.in-addr.arpa",
        "blue",
    ],
)
def test_internal_names_never_leave(responder: Responder, name: str) -> None:
    for kind in ("A", "AAAA", "TXT", "NS", "PTR"):
        asked = dns.message.make_query(name, kind)
        assert isinstance(responder.answer(asked.to_wire(), client=CLIENT), bytes)


@pytest.mark.parametrize(
    "name", ["example.org", "x.web.blue", "www.web1", "1.0.2.10.in-addr.arpa", "mycluster.locale", "."]
)
def test_other_names_are_asked_outside_r10(responder: Responder, name: str) -> None:
    asked = dns.message.make_query(name, "A")
    question = read_question(asked.to_wire())
    assert responder.answer(asked.to_wire(), client=CLIENT) == Outside(question, question)


@pytest.mark.parametrize("client", ["::ffff:10.1.0.66", "fd00::66", "10.1.0.66"])
def test_who_may_not_go_out_learns_nothing_of_the_outside(responder: Responder, client: str) -> None:
    """CVE-2024-29018."""
    assert ask(responder, "secret.example.org", client=client).rcode() == dns.rcode.REFUSED
    assert told(ask(responder, "web1", client=client)) == ["10.1.0.5"]


def test_without_the_wish_for_recursion_nobody_is_asked(responder: Responder) -> None:
    asked = dns.message.make_query("example.org", "A", flags=0)
    assert answer(responder, asked).rcode() == dns.rcode.REFUSED


@pytest.mark.parametrize("kind", ["ANY", "AXFR", "IXFR", "MAILB"])
def test_questions_for_everything_are_refused(responder: Responder, kind: str) -> None:
    for name in ("web1", "example.org"):
        assert ask(responder, name, kind).rcode() == dns.rcode.REFUSED


def test_other_classes_are_refused(responder: Responder) -> None:
    for cls in ("CH", "ANY", "NONE"):
        assert answer(responder, dns.message.make_query("web1", "A", rdclass=cls)).rcode() == dns.rcode.REFUSED


def test_other_opcodes_are_not_implemented(responder: Responder) -> None:
    for opcode in (dns.opcode.NOTIFY, dns.opcode.UPDATE, dns.opcode.STATUS):
        asked = dns.message.make_query("web1", "A")
        asked.set_opcode(opcode)
        wire = responder.answer(asked.to_wire(), client=CLIENT)
        assert isinstance(wire, bytes)
        reply = dns.message.from_wire(wire)
        assert (reply.id, reply.opcode(), reply.rcode()) == (asked.id, opcode, dns.rcode.NOTIMP)


def test_answers_are_not_answered(responder: Responder) -> None:
    for name in ("web1", "example.org"):
        reply = dns.message.make_response(dns.message.make_query(name, "A"))
        assert responder.answer(reply.to_wire(), client=CLIENT) is None
    assert responder.answer(b"\0" * 11, client=CLIENT) is None


def test_what_cannot_be_read_is_a_format_error(responder: Responder) -> None:
    asked = dns.message.make_query("web1", "A").to_wire()
    for damaged in (asked + b"\0", asked[:-1], asked[:5] + b"\2" + asked[6:]):
        wire = responder.answer(damaged, client=CLIENT)
        assert isinstance(wire, bytes)
        assert wire[:2] == asked[:2]
        assert dns.message.from_wire(wire).rcode() == dns.rcode.FORMERR


def test_newer_edns_is_told_so(responder: Responder) -> None:
    for name in ("web1", "example.org"):
        reply = answer(responder, dns.message.make_query(name, "A", use_edns=1))
        assert reply.rcode() == dns.rcode.BADVERS


def test_a_wish_for_dnssec_is_sent_back(responder: Responder) -> None:
    for kind in ("A", "MX"):
        asked = dns.message.make_query("web1", kind, want_dnssec=True)
        assert answer(responder, asked).ednsflags & dns.flags.DO


def test_a_large_answer_is_cut_by_udp_and_whole_by_tcp(responder: Responder) -> None:
    for size, limit in ((False, 512), (0, 1232)):
        asked = dns.message.make_query("db.ns.svc.cluster.local", "A", use_edns=size, payload=4096)
        wire = responder.answer(asked.to_wire(), client=CLIENT)
        assert isinstance(wire, bytes)
        assert len(wire) <= limit
        assert dns.message.from_wire(wire).flags & dns.flags.TC
        whole = answer(responder, asked, over_tcp=True)
        assert not whole.flags & dns.flags.TC
        assert len(told(whole)) == 100


def test_an_answer_larger_than_any_datagram_is_cut_too(responder: Responder) -> None:
    asked = dns.message.make_query("huge.cluster.local", "A")
    assert ask(responder, "huge.cluster.local").flags & dns.flags.TC
    assert len(told(answer(responder, asked, over_tcp=True))) == 600


def test_an_alias_is_followed_here(responder: Responder) -> None:
    reply = ask(responder, "alias.ns.svc.cluster.local")
    assert told(reply) == ["10.1.1.0", "10.1.1.1", "tiny.ns.svc.cluster.local."]
    assert isinstance(reply, dns.message.QueryMessage)
    assert reply.canonical_name().to_text() == "tiny.ns.svc.cluster.local."
    assert told(ask(responder, "alias.ns.svc.cluster.local", "CNAME")) == ["tiny.ns.svc.cluster.local."]


def test_an_alias_that_leads_nowhere_or_in_a_ring_has_an_end(responder: Responder) -> None:
    lost = ask(responder, "lost.ns.svc.cluster.local")
    assert (lost.rcode(), told(lost)) == (dns.rcode.NXDOMAIN, ["nobody."])
    ring = ask(responder, "ring.ns.svc.cluster.local", "MX")
    assert (ring.rcode(), set(told(ring))) == (dns.rcode.NOERROR, {"ring.ns.svc.cluster.local."})


def test_an_alias_to_the_outside_is_completed_there(responder: Responder) -> None:
    asked = dns.message.make_query("Out.ns.svc.cluster.local", "A")
    outside = responder.answer(asked.to_wire(), client=CLIENT)
    assert isinstance(outside, Outside)
    assert outside.ask.name == b"\3www\7example\3org\0"
    query = dns.message.make_query("www.example.org", "A")
    reply = dns.message.make_response(query)
    reply.answer.append(dns.rrset.from_text("www.example.org.", 60, "IN", "CNAME", "edge.example.net."))
    reply.answer.append(dns.rrset.from_text("edge.example.net.", 60, "IN", "A", "192.0.2.1", "192.0.2.2"))
    read = dns.message.from_wire(outside.complete(reply.to_wire(), room=512))
    assert asked.is_response(read)
    assert isinstance(read, dns.message.QueryMessage)
    assert read.canonical_name().to_text() == "edge.example.net."
    assert told(read) == ["192.0.2.1", "192.0.2.2", "edge.example.net.", "www.example.org."]
    denied = dns.message.make_response(query)
    denied.set_rcode(dns.rcode.NXDOMAIN)
    read = dns.message.from_wire(outside.complete(denied.to_wire(), room=512))
    assert (read.rcode(), told(read)) == (dns.rcode.NXDOMAIN, ["www.example.org."])


def test_who_may_not_go_out_does_not_get_there_by_an_alias(responder: Responder) -> None:
    """CVE-2024-29018."""
    assert ask(responder, "out.ns.svc.cluster.local", client="fd00::66").rcode() == dns.rcode.REFUSED


def test_named_ports_come_with_the_addresses_they_lead_to(responder: Responder) -> None:
    reply = ask(responder, "_http._tcp.tiny.ns.svc.cluster.local", "SRV")
    assert told(reply) == [f"0 100 80 10-1-1-{number}.tiny.ns.svc.cluster.local." for number in (0, 1)]
    assert sorted(rrset[0].to_text() for rrset in reply.additional) == ["10.1.1.0", "10.1.1.1"]


def test_what_was_asked_is_counted(responder: Responder) -> None:
    ask(responder, "web1")
    ask(responder, "_http._tcp.tiny.ns.svc.cluster.local", "SRV")
    ask(responder, "nobody")
    ask(responder, "web1", "ANY")
    responder.answer(b"", client=CLIENT)
    assert responder.statistics == Statistics(found=2, absent=1, refused=1, invalid=1)


@given(st.binary(max_size=200), st.booleans())
def test_no_question_does_harm(data: bytes, over_tcp: bool) -> None:
    """CVE-2025-23028: whatever comes, there is an answer of the right form, or silence."""
    responder = Responder(TABLE, domain="cluster.local", statistics=Statistics())
    prefixed = b"\x12\x34\1\0\0\1\0\0\0\0\0\0\3web\0" + data
    for message in (data, prefixed):
        wire = responder.answer(message, client=CLIENT, over_tcp=over_tcp)
        if isinstance(wire, bytes):
            assert wire[:2] == message[:2]
            dns.message.from_wire(wire)
