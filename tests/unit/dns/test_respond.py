"""Queries and answers of one tenant, checked with dnspython (contiv 7.14, R4, R10)."""

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

from weft.dns.respond import Responder, Statistics, UpstreamQuery
from weft.dns.table import Table
from weft.dns.wire import read_question
from weft.domain.addresses import parse_address
from weft.domain.dns.cluster_names import Backend, ServicePort, external_service_entry, headless_service_entry
from weft.domain.dns.names import Entry, Rank, Record, Zone, forward_and_reverse_records

CLIENT = "::ffff:10.1.0.9"
MEMBERS = 30


def zone() -> Zone:
    web1 = (parse_address("10.1.0.5", field="a"), parse_address("fd00::5", field="a"))
    backends = [Backend(parse_address(f"10.1.1.{number}", field="a")) for number in range(100)]
    ports = [ServicePort("http", "TCP", 80)]
    entries = {
        "web1": Entry(forward_and_reverse_records("web1", web1, rank=Rank.WORKLOAD)),
        "shut": Entry((), dns_egress_denied=("10.1.0.66", "fd00::66")),
        "no-tcp": Entry((), tcp_dns_egress_denied=("10.1.0.67",)),
        "db": headless_service_entry("ns", "db", backends=backends, ports=ports, domain="cluster.local"),
        "tiny": headless_service_entry("ns", "tiny", backends=backends[:2], ports=ports, domain="cluster.local"),
        "huge": Entry(
            tuple(Record("huge.cluster.local", "A", f"10.1.{n >> 8}.{n & 255}", Rank.CLUSTER) for n in range(600))
        ),
        "out": external_service_entry("ns", "out", target="www.Example.org.", domain="cluster.local"),
        "alias": external_service_entry("ns", "alias", target="tiny.ns.svc.cluster.local", domain="cluster.local"),
        "lost": external_service_entry("ns", "lost", target="absent", domain="cluster.local"),
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
    responder: Responder, query: dns.message.Message, *, client: str = CLIENT, over_tcp: bool = False
) -> dns.message.Message:
    """The answer, which must be one to the question as it was sent, with EDNS exactly when the query had it."""
    wire = responder.answer(query.to_wire(), client=client, over_tcp=over_tcp)
    assert isinstance(wire, bytes)
    read = dns.message.from_wire(wire)
    assert query.is_response(read)
    assert read.question[0].name.to_wire() == query.question[0].name.to_wire(), "the case of letters is kept"
    assert (read.edns >= 0) == (query.edns >= 0)
    return read


def lookup(responder: Responder, name: str, kind: str = "A", *, client: str = CLIENT) -> dns.message.Message:
    return answer(responder, dns.message.make_query(name, kind), client=client)


def records_of(message: dns.message.Message) -> list[str]:
    return sorted(record.to_text() for rrset in message.answer for record in rrset)


def test_a_container_resolves_forward_and_reverse_r4(responder: Responder) -> None:
    assert records_of(lookup(responder, "web1")) == ["10.1.0.5"]
    assert records_of(lookup(responder, "web1", "AAAA")) == ["fd00::5"]
    assert records_of(lookup(responder, "5.0.1.10.in-addr.arpa", "PTR")) == ["web1."]
    assert records_of(lookup(responder, f"5{'.0' * 27}.0.0.d.f.ip6.arpa", "PTR")) == ["web1."]


@given(st.lists(st.booleans(), min_size=4, max_size=4))
def test_letter_case_is_ignored_and_preserved(upper: list[bool]) -> None:
    responder = Responder(TABLE, domain="cluster.local", statistics=Statistics())
    name = "".join(letter.upper() if up else letter for letter, up in zip("web1", upper, strict=True))
    assert records_of(lookup(responder, name)) == ["10.1.0.5"]
    reply = lookup(responder, f"{name}.Cluster.Local")
    assert reply.rcode() == dns.rcode.NXDOMAIN


@pytest.mark.parametrize("edns", [False, 0])
def test_a_group_answers_ten_random_members_r4(responder: Responder, edns: int) -> None:
    seen: set[str] = set()
    orders: set[tuple[str, ...]] = set()
    for _ in range(200):
        reply = answer(responder, dns.message.make_query("web", "A", use_edns=edns))
        assert len(reply.answer[0]) == 10
        orders.add(tuple(record.to_text() for record in reply.answer[0]))
        seen |= set(records_of(reply))
    assert len(seen) == MEMBERS
    assert len(orders) > 100


def test_answers_are_authoritative_and_offer_recursion(responder: Responder) -> None:
    for name in ("web1", "absent"):
        reply = lookup(responder, name)
        assert reply.flags & dns.flags.AA
        assert reply.flags & dns.flags.RA
    assert lookup(responder, "web1").answer[0].ttl == 30


def test_nxdomain_and_nodata_are_distinguished(responder: Responder) -> None:
    for name, kind, code in (
        ("absent", "A", dns.rcode.NXDOMAIN),
        ("web1", "HTTPS", dns.rcode.NOERROR),
        ("web", "AAAA", dns.rcode.NOERROR),
        ("web.blue", "MX", dns.rcode.NOERROR),
        ("blue", "A", dns.rcode.NOERROR),
        ("absent.ns.svc.cluster.local", "A", dns.rcode.NXDOMAIN),
        ("ns.svc.cluster.local", "A", dns.rcode.NOERROR),
        ("cluster.local", "SOA", dns.rcode.NOERROR),
        ("9.9.1.10.in-addr.arpa", "PTR", dns.rcode.NXDOMAIN),
    ):
        reply = lookup(responder, name, kind)
        assert (name, reply.rcode(), records_of(reply)) == (name, code, [])
        (soa,) = reply.authority
        assert dns.name.from_text(name).is_subdomain(soa.name)
        assert soa[0].minimum == soa.ttl == 5


@pytest.mark.parametrize(
    "name",
    [
        "absent",
        "web2",
        "x.cluster.local",
        "a.b.svc.CLUSTER.local",
        "1.0.1.10.in-addr.arpa",
        "1.10.in-addr.arpa",
        "blue",
    ],
)
def test_authoritative_names_are_never_forwarded(responder: Responder, name: str) -> None:
    for kind in ("A", "AAAA", "TXT", "NS", "PTR"):
        query = dns.message.make_query(name, kind)
        assert isinstance(responder.answer(query.to_wire(), client=CLIENT), bytes)


@pytest.mark.parametrize(
    "name", ["example.org", "x.web.blue", "www.web1", "1.0.2.10.in-addr.arpa", "mycluster.locale", "."]
)
def test_other_names_are_forwarded_r10(responder: Responder, name: str) -> None:
    query = dns.message.make_query(name, "A")
    question = read_question(query.to_wire())
    assert responder.answer(query.to_wire(), client=CLIENT) == UpstreamQuery(question, question)


@pytest.mark.parametrize("client", ["::ffff:10.1.0.66", "fd00::66", "10.1.0.66"])
def test_denied_dns_egress_is_refused(responder: Responder, client: str) -> None:
    """CVE-2024-29018."""
    assert lookup(responder, "secret.example.org", client=client).rcode() == dns.rcode.REFUSED
    assert records_of(lookup(responder, "web1", client=client)) == ["10.1.0.5"]


@pytest.mark.parametrize(("client", "over_tcp"), [("10.1.0.66", False), ("::ffff:10.1.0.67", True)])
def test_dns_egress_is_denied_by_transport(responder: Responder, client: str, over_tcp: bool) -> None:
    """CVE-2024-29018: who may not send to TCP 53 does not get queries over TCP forwarded, and the other way round."""
    query = dns.message.make_query("secret.example.org", "A", use_edns=0)
    refused = answer(responder, query, client=client, over_tcp=over_tcp)
    assert refused.rcode() == dns.rcode.REFUSED
    (why,) = refused.options
    assert "egress policy" in why.to_text()
    assert isinstance(responder.answer(query.to_wire(), client=client, over_tcp=not over_tcp), UpstreamQuery)


def test_a_query_without_rd_is_not_forwarded(responder: Responder) -> None:
    query = dns.message.make_query("example.org", "A", flags=0)
    assert answer(responder, query).rcode() == dns.rcode.REFUSED


@pytest.mark.parametrize("kind", ["ANY", "AXFR", "IXFR", "MAILB"])
def test_meta_types_are_refused(responder: Responder, kind: str) -> None:
    for name in ("web1", "example.org"):
        assert lookup(responder, name, kind).rcode() == dns.rcode.REFUSED


def test_other_classes_are_refused(responder: Responder) -> None:
    for cls in ("CH", "ANY", "NONE"):
        assert answer(responder, dns.message.make_query("web1", "A", rdclass=cls)).rcode() == dns.rcode.REFUSED


def test_other_opcodes_are_not_implemented(responder: Responder) -> None:
    for opcode in (dns.opcode.NOTIFY, dns.opcode.UPDATE, dns.opcode.STATUS):
        query = dns.message.make_query("web1", "A")
        query.set_opcode(opcode)
        wire = responder.answer(query.to_wire(), client=CLIENT)
        assert isinstance(wire, bytes)
        reply = dns.message.from_wire(wire)
        assert (reply.id, reply.opcode(), reply.rcode()) == (query.id, opcode, dns.rcode.NOTIMP)


def test_a_response_gets_no_answer(responder: Responder) -> None:
    for name in ("web1", "example.org"):
        reply = dns.message.make_response(dns.message.make_query(name, "A"))
        assert responder.answer(reply.to_wire(), client=CLIENT) is None
    assert responder.answer(b"\0" * 11, client=CLIENT) is None


def test_a_malformed_query_gets_formerr(responder: Responder) -> None:
    query = dns.message.make_query("web1", "A").to_wire()
    for damaged in (query + b"\0", query[:-1], query[:5] + b"\2" + query[6:]):
        wire = responder.answer(damaged, client=CLIENT)
        assert isinstance(wire, bytes)
        assert wire[:2] == query[:2]
        assert dns.message.from_wire(wire).rcode() == dns.rcode.FORMERR


def test_a_newer_edns_version_gets_badvers(responder: Responder) -> None:
    for name in ("web1", "example.org"):
        reply = answer(responder, dns.message.make_query(name, "A", use_edns=1))
        assert reply.rcode() == dns.rcode.BADVERS


def test_the_dnssec_ok_bit_is_copied(responder: Responder) -> None:
    for kind in ("A", "MX"):
        query = dns.message.make_query("web1", kind, want_dnssec=True)
        assert answer(responder, query).ednsflags & dns.flags.DO


def test_a_large_answer_is_truncated_over_udp_and_complete_over_tcp(responder: Responder) -> None:
    for size, limit in ((False, 512), (0, 1232)):
        query = dns.message.make_query("db.ns.svc.cluster.local", "A", use_edns=size, payload=4096)
        wire = responder.answer(query.to_wire(), client=CLIENT)
        assert isinstance(wire, bytes)
        assert len(wire) <= limit
        assert dns.message.from_wire(wire).flags & dns.flags.TC
        whole = answer(responder, query, over_tcp=True)
        assert not whole.flags & dns.flags.TC
        assert len(records_of(whole)) == 100


def test_an_answer_larger_than_any_datagram_is_truncated(responder: Responder) -> None:
    query = dns.message.make_query("huge.cluster.local", "A")
    assert lookup(responder, "huge.cluster.local").flags & dns.flags.TC
    assert len(records_of(answer(responder, query, over_tcp=True))) == 600


def test_a_cname_within_the_zone_is_chased(responder: Responder) -> None:
    reply = lookup(responder, "alias.ns.svc.cluster.local")
    assert records_of(reply) == ["10.1.1.0", "10.1.1.1", "tiny.ns.svc.cluster.local."]
    assert isinstance(reply, dns.message.QueryMessage)
    assert reply.canonical_name().to_text() == "tiny.ns.svc.cluster.local."
    assert records_of(lookup(responder, "alias.ns.svc.cluster.local", "CNAME")) == ["tiny.ns.svc.cluster.local."]


def test_a_dangling_cname_and_a_cname_loop_end(responder: Responder) -> None:
    lost = lookup(responder, "lost.ns.svc.cluster.local")
    assert (lost.rcode(), records_of(lost)) == (dns.rcode.NXDOMAIN, ["absent."])
    ring = lookup(responder, "ring.ns.svc.cluster.local", "MX")
    assert (ring.rcode(), set(records_of(ring))) == (dns.rcode.NOERROR, {"ring.ns.svc.cluster.local."})


def test_a_cname_out_of_the_zone_is_completed_upstream(responder: Responder) -> None:
    query = dns.message.make_query("Out.ns.svc.cluster.local", "A")
    forwarded = responder.answer(query.to_wire(), client=CLIENT)
    assert isinstance(forwarded, UpstreamQuery)
    assert forwarded.query.name == b"\3www\7example\3org\0"
    upstream = dns.message.make_query("www.example.org", "A")
    reply = dns.message.make_response(upstream)
    reply.answer.append(dns.rrset.from_text("www.example.org.", 60, "IN", "CNAME", "edge.example.net."))
    reply.answer.append(dns.rrset.from_text("edge.example.net.", 60, "IN", "A", "192.0.2.1", "192.0.2.2"))
    read = dns.message.from_wire(forwarded.complete(reply.to_wire(), max_size=512))
    assert query.is_response(read)
    assert isinstance(read, dns.message.QueryMessage)
    assert read.canonical_name().to_text() == "edge.example.net."
    assert records_of(read) == ["192.0.2.1", "192.0.2.2", "edge.example.net.", "www.example.org."]
    denied = dns.message.make_response(upstream)
    denied.set_rcode(dns.rcode.NXDOMAIN)
    read = dns.message.from_wire(forwarded.complete(denied.to_wire(), max_size=512))
    assert (read.rcode(), records_of(read)) == (dns.rcode.NXDOMAIN, ["www.example.org."])


def test_denied_dns_egress_is_refused_behind_a_cname_too(responder: Responder) -> None:
    """CVE-2024-29018."""
    assert lookup(responder, "out.ns.svc.cluster.local", client="fd00::66").rcode() == dns.rcode.REFUSED


def test_srv_answers_have_the_targets_addresses_as_additional_records(responder: Responder) -> None:
    reply = lookup(responder, "_http._tcp.tiny.ns.svc.cluster.local", "SRV")
    assert records_of(reply) == [f"0 100 80 10-1-1-{number}.tiny.ns.svc.cluster.local." for number in (0, 1)]
    assert sorted(rrset[0].to_text() for rrset in reply.additional) == ["10.1.1.0", "10.1.1.1"]


def test_queries_are_counted_by_result(responder: Responder) -> None:
    lookup(responder, "web1")
    lookup(responder, "_http._tcp.tiny.ns.svc.cluster.local", "SRV")
    lookup(responder, "absent")
    lookup(responder, "web1", "ANY")
    responder.answer(b"", client=CLIENT)
    assert responder.statistics == Statistics(found=2, absent=1, refused=1, invalid=1)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_get_a_well_formed_answer_or_none(data: bytes, over_tcp: bool) -> None:
    """CVE-2025-23028: any input gets a well-formed answer or none."""
    responder = Responder(TABLE, domain="cluster.local", statistics=Statistics())
    prefixed = b"\x12\x34\1\0\0\1\0\0\0\0\0\0\3web\0" + data
    for message in (data, prefixed):
        wire = responder.answer(message, client=CLIENT, over_tcp=over_tcp)
        if isinstance(wire, bytes):
            assert wire[:2] == message[:2]
            dns.message.from_wire(wire)
