"""Parsers of a node: CNI requests, frames of the shim, netlink replies, packet headers, the attachment log."""

from __future__ import annotations

import json
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from tests.support.fuzz.engine import Parse, Target
from tests.support.fuzz.mutations import Form

from weft.agent.cni.server import read_request
from weft.agent.store.attachment_store import FORMAT, Attachment, AttachmentWal, Stage
from weft.cni import wire
from weft.cni.chains import read_chain
from weft.cni.errors import CniError
from weft.cni.versions import answer_version, encode_versions
from weft.domain import model
from weft.domain.addresses import parse_address
from weft.domain.errors import DatapathFault, Malformed, Unavailable
from weft.domain.ids import EndpointId, NetworkName, TenantName
from weft.kernel.netlink import codec, conntrack, link, neigh, nflog, nft_set, route, tc
from weft.kernel.netlink.socket import NetlinkError, _check
from weft.kernel.packet_headers import parse_packet
from weft.kernel.uapi.netlink import NLM_F_ACK_TLVS, NLMSG_ERROR

_ENVIRONMENT = {
    "CNI_COMMAND": "ADD",
    "CNI_CONTAINERID": "4f3a",
    "CNI_NETNS": "/run/netns/x",
    "CNI_IFNAME": "eth0",
    "CNI_PATH": "/opt/cni/bin",
    "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=web;K8S_POD_UID=u;IP=10.1.1.5;MAC=02:02:0a:01:01:05",
}
_CONFIG = {
    "cniVersion": "1.1.0",
    "name": "weft",
    "type": "weft-cni",
    "ipam": {},
    "labels": {"io.contiv.tenant": "blue"},
    "args": {
        "cni": {"ips": ["10.1.1.5"], "labels": [{"key": "a", "value": "b"}]},
        "org.apache.mesos": {"network_info": {"labels": {"labels": [{"key": "k", "value": "v"}]}}},
    },
    "runtimeConfig": {
        "ips": ["10.1.1.5/24", "fd00::5"],
        "mac": "02:02:0a:01:01:05",
        "aliases": {"weft": ["web"]},
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "127.0.0.1"}],
        "bandwidth": {"ingressRate": 1000, "ingressBurst": 2000, "egressRate": 1000, "egressBurst": 2000},
        "dns": {"servers": ["10.0.0.10"], "searches": ["a.b"], "options": ["ndots:5"]},
        "io.kubernetes.cri.pod-annotations": {"a": "b"},
    },
    "cni.dev/valid-attachments": [{"containerID": "4f3a", "ifname": "eth0"}],
    "dns": {"nameservers": ["10.0.0.10"], "domain": "x", "search": ["y"], "options": []},
    "prevResult": {
        "cniVersion": "1.1.0",
        "interfaces": [{"name": "eth0", "mac": "02:02:0a:01:01:05", "sandbox": "/run/netns/x", "mtu": 1450}],
        "ips": [{"address": "10.1.1.5/24", "gateway": "10.1.1.1", "interface": 0}],
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.1.1", "mtu": 1400, "table": 7}],
        "dns": {"nameservers": ["10.0.0.10"]},
    },
}
_OLD = {
    "cniVersion": "0.2.0",
    "name": "weft",
    "type": "weft-cni",
    "prevResult": {"ip4": {"ip": "10.1.1.5/24", "gateway": "10.1.1.1", "routes": [{"dst": "0.0.0.0/0"}]}},
}


def _configs() -> list[bytes]:
    return [json.dumps(each).encode() for each in (_CONFIG, _OLD, {**_CONFIG, "cniVersion": "0.4.0"})]


def _calls() -> list[bytes]:
    """The bodies of frames, of each verb."""
    bodies = []
    for verb in ("ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"):
        call = wire.Call(environment={**_ENVIRONMENT, "CNI_COMMAND": verb}, stdin=_configs()[0], deadline=5)
        bodies.append(wire.encode_call(call)[wire.HEADER_SIZE :])
    return bodies


def _read_call(body: bytes) -> object:
    call = wire.decode_call(body)
    answer_version(call.stdin)
    return read_request(call.environment, call.stdin)


def _read_config(stdin: bytes) -> object:
    encode_versions(stdin)
    found: object = None
    for verb in ("ADD", "DEL", "CHECK", "GC"):
        try:
            found = read_request({**_ENVIRONMENT, "CNI_COMMAND": verb}, stdin)
        except CniError as error:
            error.encode(version=answer_version(stdin))
    return found


def _read_environment(data: bytes) -> object:
    """Variables as a runtime sets them: NAME=value lines, any bytes."""
    environment = dict(_ENVIRONMENT)
    for line in data.replace(b"\0", b"").decode(errors="surrogateescape").split("\n"):
        name, equals, value = line.partition("=")
        if equals:
            environment[name] = value
    try:
        return read_request(environment, _configs()[0])
    except CniError as error:
        return error.encode(version="1.1.0")


def _read_frames(data: bytes) -> object:
    wire.decode_answer(data[wire.HEADER_SIZE :])
    return wire.body_size(data[: wire.HEADER_SIZE])


def _open_chain() -> Parse:
    folder = Path(tempfile.mkdtemp(prefix="weft-fuzz-"))
    file = folder / "10-weft.conflist"

    def parse(data: bytes) -> object:
        file.write_bytes(data)
        return read_chain(file)

    return parse


def _attachments() -> list[Attachment]:
    return [
        Attachment(
            endpoint=model.Endpoint(
                tenant=TenantName("blue"),
                network=NetworkName("net"),
                endpoint_id=EndpointId(f"e{number}"),
                ip_address=f"10.1.1.{number}",
                container_id=f"c{number}",
                interface="eth0",
            ),
            published=True,
            stage=stage,
            network_name="weft",
        )
        for number, stage in enumerate(Stage)
    ]


def _log_lines() -> list[bytes]:
    return [json.dumps({"format": FORMAT, "boot": "boot"}).encode()] + [
        msgspec.json.encode({"key": each.key, "attachment": each}) for each in _attachments()
    ]


def _checked(line: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(line), line)


def _open_log(*, checked: bool) -> Callable[[], Parse]:
    """The log as it stands, or one record of it with the right checksum: what a broken writer leaves."""

    def make() -> Parse:
        folder = Path(tempfile.mkdtemp(prefix="weft-fuzz-"))
        file = folder / "attachments"

        def parse(data: bytes) -> object:
            lines = _log_lines()
            file.write_bytes(
                b"".join(map(_checked, [*lines[:2], data.replace(b"\n", b" "), *lines[2:]])) if checked else data
            )
            wal = AttachmentWal(file, boot="boot")
            try:
                return list(wal)
            finally:
                wal.close()

        return parse

    return make


_V4, _V6 = (parse_address(text, field="address") for text in ("10.0.0.1", "fd00::1"))
_UDP = bytes.fromhex("45000020000100004011000000000000".ljust(32, "0")) + bytes.fromhex("0a0000010a00000204d20050")
_UDP6 = (
    bytes.fromhex("600000000010004000000000000000000000000000000001".ljust(80, "0"))
    + bytes.fromhex("1100010400000000")
    + b"\x04\xd2\0\x50"
)
_PACKETS = (_UDP, _UDP6, _UDP6[:6] + b"\x2c" + _UDP6[7:], _UDP6[:6] + b"\x33" + _UDP6[7:])


def _links() -> list[bytes]:
    device = link.Device(name="wp1", index=100, mac="ee:ee:ee:ee:ee:ee", mtu=1450)
    return [
        request.payload
        for request in (
            link.create_veth(device, link.Device(name="eth0"), peer_namespace=9, master=50, group=7),
            link.create_bridge(device),
            link.create_vxlan(device, link.Vxlan(vni=77, port=4789, local=_V4)),
            link.create_vxlan(device, link.Vxlan(vni=77, port=4789, local=_V6)),
            link.add_altname(3, "weft"),
        )
    ]


def _routes() -> list[bytes]:
    via = route.Route(
        to=route.Prefix(_V4, 32), link=3, via=_V6, on_link=True, source=_V4, table=1000, metric=7, mtu=1400
    )
    rules = [route.Rule(family=4, priority=1, table=7, mark=1, mask=3, source=route.Prefix(_V4, 32), input_link="eth0")]
    addresses = [
        route.LinkAddress(link=3, prefix=route.Prefix(address, length)) for address, length in ((_V4, 24), (_V6, 64))
    ]
    return [
        route.put_route(via).payload,
        route.put_route(route.Route(to=route.Prefix(_V6, 128), link=3)).payload,
        *(route.put_rule(each).payload for each in rules),
        *(route.put_address(each).payload for each in addresses),
    ]


def _neighbours() -> list[bytes]:
    mac = "02:02:0a:00:00:02"
    return [
        neigh.put_neighbour(neigh.Neighbour(link=3, address=_V4, mac=mac)).payload,
        neigh.put_proxy(neigh.Proxy(link=3, address=_V6)).payload,
        neigh.put_fdb_entry(neigh.FdbEntry(link=3, mac=mac, remote=_V4)).payload,
        neigh.put_fdb_entry(neigh.FdbEntry(link=3, mac=mac)).payload,
    ]


def _qdiscs() -> list[bytes]:
    limit = tc.Limit(link=3, rate=125_000, burst=1_000_000)
    return [
        tc.put_limit(limit).payload,
        *(each.payload for each in tc.put_redirect(tc.IngressRedirect(link=3, into=9))),
    ]


def _connections() -> list[bytes]:
    samples = []
    for address in (_V4, _V6):
        direction = conntrack.Direction(
            source=address, destination=address, protocol=6, source_port=4000, destination_port=80
        )
        pattern = conntrack.Pattern(original=direction, reply=direction)
        samples.append(bytes([codec.AF[address.family], 0, 0, 0]) + conntrack.encode_filter(pattern))
    return samples


def _elements() -> list[bytes]:
    target = nft_set.SetName(1, "weft", "ports")
    elements = [
        nft_set.Element(key=nft_set.key(nft_set.interface("wp1"), nft_set.port(80)), value=b"\0\0\0\7"),
        nft_set.Element(key=nft_set.port(80), verdict=nft_set.Verdict(-3, "chain")),
    ]
    counter = codec.nest(
        1, codec.text(1, "counter"), codec.nest(2, codec.attribute(1, bytes(8)), codec.attribute(2, bytes(8)))
    )
    counted = codec.nest(1, codec.nested(1, 1, bytes(24)), codec.nest(7, codec.text(1, "counter"), counter[4:]))
    return [nft_set.put_elements(target, elements)[0].payload, bytes(4) + codec.nest(3, counted, counted, counted)]


def _logged() -> list[bytes]:
    head = (
        b"\x02\0\0\x57"
        + codec.be32(2, 0x222)
        + codec.attribute(3, struct.pack(">QQ", 1_700_000_000, 1))
        + codec.be32(4, 7)
    )
    return [head + codec.attribute(9, packet) for packet in _PACKETS]


def _acks() -> list[bytes]:
    request = route.put_route(route.Route(to=route.Prefix(_V4, 32), link=3))
    error = struct.pack("=i", -17) + request.encode(sequence=1)[:16] + codec.text(1, "File exists")
    both = [
        struct.pack("=IHHII", 16 + len(error), NLMSG_ERROR, NLM_F_ACK_TLVS | flag, 1, 0) + error for flag in (0, 0x100)
    ]
    return [*both, both[0] + both[1], request.encode(sequence=7)]


def _read_acks(data: bytes) -> object:
    request = route.put_route(route.Route(to=route.Prefix(_V4, 32), link=3))
    for message in codec.messages(data):
        try:
            _check(message, request)
        except NetlinkError as error:
            str(error)
    return None


def _all_of(*parsers: Callable[[bytes], object]) -> Callable[[], Parse]:
    """Every parser gets the input, whatever the others raise."""

    def parse(data: bytes) -> object:
        for parser in parsers:
            try:
                parser(data)
            except DatapathFault:
                continue
        return None

    return lambda: parse


def _list(parser: Callable[[bytes], Sequence[object] | object]) -> Parse:
    def parse(data: bytes) -> object:
        found = parser(data)
        return list(found) if hasattr(found, "__iter__") else found

    return parse


_CNI_WORDS = (
    b"CNI_COMMAND=",
    b"CNI_ARGS=",
    b"CNI_IFNAME=",
    b"CNI_NETNS=/proc/self/ns/net",
    b";",
    b"=",
    b"\0",
    b"K8S_POD_UID=",
    b"%d",
    b"../",
)
_NETLINK = (DatapathFault,)

TARGETS = (
    Target(name="cni-stdin", open=lambda: _read_config, samples=_configs, errors=(CniError,), form=Form.JSON, weight=2),
    Target(
        name="cni-call", open=lambda: _read_call, samples=_calls, errors=(CniError, wire.Unreadable), words=_CNI_WORDS
    ),
    Target(
        name="cni-environment",
        open=lambda: _read_environment,
        errors=(CniError,),
        words=_CNI_WORDS,
        samples=lambda: ["\n".join(f"{name}={value}" for name, value in _ENVIRONMENT.items()).encode()],
    ),
    Target(
        name="cni-frame",
        open=lambda: _read_frames,
        errors=(wire.Unreadable,),
        samples=lambda: [wire.encode_answer(wire.Answer(exit_code=0, stdout=b"{}")), wire.MAGIC + _calls()[0]],
    ),
    Target(
        name="cni-chain",
        open=_open_chain,
        samples=lambda: [json.dumps({"name": "weft", "plugins": [_OLD, _CONFIG]}).encode()],
        form=Form.JSON,
        weight=0.3,
    ),
    Target(
        name="attachment-log",
        open=_open_log(checked=False),
        errors=(Malformed, Unavailable),
        weight=0.1,
        samples=lambda: [b"".join(map(_checked, _log_lines()))],
    ),
    Target(
        name="attachment-record",
        open=_open_log(checked=True),
        errors=(Malformed, Unavailable),
        form=Form.JSON,
        weight=0.1,
        samples=lambda: _log_lines()[1:],
    ),
    Target(name="netlink-link", open=lambda: _list(link.parse_link), samples=_links, errors=_NETLINK),
    Target(
        name="netlink-route", open=_all_of(route.parse_route, route.parse_rule, route.parse_address), samples=_routes
    ),
    Target(
        name="netlink-neigh",
        open=_all_of(neigh.parse_neighbour, neigh.parse_proxy, neigh.parse_fdb_entry),
        samples=_neighbours,
    ),
    Target(name="netlink-tc", open=_all_of(tc.parse_limit, tc.parse_redirect), samples=_qdiscs),
    Target(name="netlink-conntrack", open=lambda: conntrack.parse_connection, samples=_connections, errors=_NETLINK),
    Target(
        name="netlink-nft-set",
        open=_all_of(lambda data: list(nft_set.parse_elements(data)), lambda data: list(nft_set.parse_counts(data))),
        samples=_elements,
    ),
    Target(name="netlink-nflog", open=lambda: nflog.parse_logged_packet, samples=_logged, errors=_NETLINK),
    Target(name="netlink-ack", open=lambda: _read_acks, samples=_acks, errors=_NETLINK),
    Target(name="packet-headers", open=lambda: parse_packet, samples=lambda: list(_PACKETS), errors=_NETLINK),
)
