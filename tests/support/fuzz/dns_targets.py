"""Parsers of netdns: queries of pods, answers of upstreams, the control protocol, the zone cache, resolv.conf."""

from __future__ import annotations

import asyncio
import struct
import tempfile
from pathlib import Path

from tests.support.fuzz.engine import Parse, Target
from tests.support.fuzz.mutations import Form

from weft.dns.encode import adapt_answer, encode_question
from weft.dns.respond import Responder, Statistics, UpstreamQuery
from weft.dns.table import Table
from weft.dns.upstream import Upstream, Upstreams, parse_resolv_conf
from weft.dns.wire import check_answer, read_question
from weft.dns.zone_cache import ZoneCache
from weft.domain.dns.names import Entry, Rank, Record, Zone
from weft.domain.errors import Invalid, Malformed
from weft.domain.ids import TenantName
from weft.runtime.dns_control import (
    LENGTH,
    Entries,
    FullSync,
    Report,
    StatusQuery,
    Tenant,
    decode_message,
    decode_report,
    encode,
    read_body,
)

_CLIENT = "::ffff:10.1.0.9"
_ZONE = Zone(
    {
        "web": Entry(
            (
                Record("web", "A", "10.1.0.5", Rank.WORKLOAD),
                Record("5.0.1.10.in-addr.arpa", "PTR", "web", Rank.WORKLOAD),
            )
        ),
        "v6": Entry((Record("web", "AAAA", "fd00::5", Rank.WORKLOAD),), dns_egress_denied=("10.1.0.66",)),
        "out": Entry((Record("out.ns.svc.cluster.local", "CNAME", "www.example.org", Rank.CLUSTER),)),
        "srv": Entry((Record("_http._tcp.db.ns.svc.cluster.local", "SRV", "0 100 80 web", Rank.CLUSTER),)),
        "ring": Entry((Record("ring.cluster.local", "CNAME", "ring.cluster.local", Rank.CLUSTER),)),
        **{f"m{number}": Entry((Record("group", "A", f"10.1.2.{number}", Rank.GROUP),)) for number in range(40)},
    },
    ("10.1.0.0/16", "fd00::/64"),
)
_ID = 0x1234


def _name(text: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in text.split(".") if label) + b"\0"


def _query(name: str, kind: int = 1, *, edns: bool = False, flags: int = 0x0100) -> bytes:
    opt = b"\0" + struct.pack("!HHIH", 41, 1232, 0x8000, 0) if edns else b""
    return struct.pack("!6H", _ID, flags, 1, 0, 0, edns) + _name(name) + struct.pack("!HH", kind, 1) + opt


def _queries() -> list[bytes]:
    names = (
        "web",
        "group",
        "www.example.org",
        "out.ns.svc.cluster.local",
        "ring.cluster.local",
        "absent",
        "5.0.1.10.in-addr.arpa",
        "",
    )
    plain = [_query(name, kind, edns=edns) for name in names for kind in (1, 28) for edns in (False, True)]
    return [*plain, _query("_http._tcp.db.ns.svc.cluster.local", 33), _query("web", 255), _query("web", flags=0x2800)]


def _open_responder() -> Parse:
    table = Table(ttl=30)
    table.replace(_ZONE)
    responder = Responder(table, domain="cluster.local", statistics=Statistics())

    def parse(data: bytes) -> object:
        for over_tcp in (False, True):
            answer = responder.answer(data, client=_CLIENT, over_tcp=over_tcp)
            if isinstance(answer, UpstreamQuery):
                encode_question(answer.query, msg_id=7)
        return answer

    return parse


_QUESTION = read_question(_query("www.example.org", edns=True))


def _answers() -> list[bytes]:
    """Answers of an upstream: addresses, CNAMEs with compression pointers, and an error."""
    head = _query("www.example.org")[2:12]
    question = _QUESTION.wire_question
    address = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 60, 4) + b"\x08\x08\x08\x08"
    cname = b"\xc0\x0c" + struct.pack("!HHIH", 5, 1, 60, 2 + 4) + b"\3cdn\xc0\x10"
    begin = struct.pack("!HHH", _ID, 0x8180, 1)
    assert len(head) == 10
    return [
        begin + struct.pack("!3H", 1, 0, 0) + question + address,
        begin + struct.pack("!3H", 3, 0, 0) + question + cname + address * 2,
        struct.pack("!6H", _ID, 0x8183, 1, 0, 0, 0) + question,
        begin
        + struct.pack("!3H", 2, 0, 0)
        + question
        + b"\xc0\x0c"
        + struct.pack("!HHIH", 28, 1, 60, 16)
        + bytes(16)
        + address,
    ]


def _read_answer(data: bytes) -> object:
    check_answer(data, msg_id=_ID, question=_QUESTION)
    cnames = (b"\xc0\x0c" + struct.pack("!HHIH", 5, 1, 30, 17) + _name("www.example.org"),)
    upstream = UpstreamQuery(read_question(_query("out.ns.svc.cluster.local")), _QUESTION, cnames)
    upstream.complete(data, max_size=1232)
    return adapt_answer(data, _QUESTION)


def _messages() -> list[bytes]:
    blue = TenantName("blue")
    messages = (
        FullSync({blue: _ZONE}),
        Tenant(blue, _ZONE),
        Tenant(blue),
        Entries(blue, {"x": _ZONE.entries["web"]}, ("v6",)),
        StatusQuery(),
    )
    return [encode(each)[LENGTH.size :] for each in messages]


def _open_control() -> Parse:
    table = Table(ttl=30)

    def parse(body: bytes) -> object:
        match decode_message(body):
            case FullSync(zones):
                for zone in zones.values():
                    table.replace(zone)
            case Tenant(_, zone) if zone is not None:
                table.replace(zone)
            case Entries(_, put, drop):
                table.change(put, drop)
        return table.zone

    return parse


def _read_frame(data: bytes) -> object:
    async def read() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_body(reader)

    return asyncio.run(read())


def _open_zone_cache() -> Parse:
    file = Path(tempfile.mkdtemp(prefix="weft-fuzz-")) / "zones"
    cache = ZoneCache(file)

    def parse(data: bytes) -> object:
        file.write_bytes(data)
        return list(cache.read())

    return parse


def _open_resolv_conf() -> Parse:
    file = Path(tempfile.mkdtemp(prefix="weft-fuzz-")) / "resolv.conf"

    def parse(data: bytes) -> object:
        file.write_bytes(data)
        found = parse_resolv_conf(data.decode(errors="replace"))
        assert all(isinstance(each, Upstream) for each in found)
        return Upstreams((), file=file).addresses()

    return parse


TARGETS = (
    Target(
        name="dns-query",
        open=_open_responder,
        samples=_queries,
        errors=(),
        weight=3,
        words=(b"\xc0\x0c", b"\0", b"\x3f", b"\0\1\0\1", b"\0\x29", _name("cluster.local"), _name("in-addr.arpa")),
    ),
    Target(
        name="dns-upstream-answer",
        open=lambda: _read_answer,
        samples=_answers,
        errors=(Malformed,),
        weight=2,
        words=(b"\xc0\x0c", b"\xc0\x00", b"\xc0\x10", b"\0\5\0\1", b"\0\1\0\1\0\0\0\1\0\4"),
    ),
    Target(name="dns-control", open=_open_control, samples=_messages, errors=(Invalid,), form=Form.MSGPACK),
    Target(
        name="dns-control-frame",
        open=lambda: _read_frame,
        errors=(Malformed, asyncio.IncompleteReadError),
        weight=0.1,
        samples=lambda: [LENGTH.pack(len(each)) + each for each in _messages()],
    ),
    Target(
        name="dns-report",
        open=lambda: decode_report,
        errors=(Malformed,),
        form=Form.MSGPACK,
        samples=lambda: [
            encode(Report(error="x", serving=(TenantName("blue"),), statistics={"found": 1}))[LENGTH.size :]
        ],
    ),
    Target(
        name="dns-zone-cache",
        open=_open_zone_cache,
        errors=(),
        weight=0.3,
        samples=lambda: [b"".join(LENGTH.pack(len(each)) + each for each in _messages())],
    ),
    Target(
        name="resolv-conf",
        open=_open_resolv_conf,
        errors=(),
        weight=0.2,
        samples=lambda: [b"nameserver 10.0.0.10\nnameserver fe80::1%eth0\nnameserver ::ffff:10.0.0.9\nsearch a b\n"],
    ),
)
