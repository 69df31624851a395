"""Inputs that once broke a parser, by target: fuzzing found them, or a reading of what it found."""

from __future__ import annotations

import base64
import struct

import msgspec
from tests.support.fuzz import dns_targets, kubernetes_targets, node_targets, ovs_targets, store_targets
from tests.support.fuzz.inputs import SEPARATOR

_DEEP = b"[" * 100_000
_UUID = "11111111-1111-1111-1111-111111111111"


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


def _pem_with(sample: bytes, old: bytes, new: bytes) -> bytes:
    """A PEM text whose DER has other bytes in one place."""
    first, *body, last = sample.strip().split(b"\n")
    der = base64.b64decode(b"".join(body)).replace(old, new, 1)
    return b"\n".join((first, base64.encodebytes(der).strip(), last, b""))


def _pointer_chain() -> bytes:
    """An upstream's answer of 64 KiB in which each of 3,000 owners is the end of a chain of 8,000 pointers."""
    question = dns_targets._QUESTION.wire_question
    head = struct.pack("!6H", dns_targets._ID, 0x8180, 1, 3001, 0, 0) + question
    begin = len(head) + 11  # the chain is the data of the first record
    chain = b"\0\0" + b"".join(struct.pack("!H", 0xC000 | begin + 2 * number) for number in range(8000 - len(head)))
    first = b"\0" + struct.pack("!HHIH", 16, 1, 0, len(chain)) + chain
    last = 0xC000 | begin + len(chain) - 2
    record = struct.pack("!HHHIH", last & 0xFFFF, 1, 1, 60, 4) + bytes(4)
    return head + first + record * 3000


def _nested_conntrack() -> bytes:
    """A flow whose ct action has a ct action in it, and so on 2,000 times."""
    length, action = 0, b""
    for _ in range(2000):
        length += 24
        action = struct.pack("!HHIHHIHB3xH", 0xFFFF, length, 0x2320, 35, 0, 0, 15, 255, 0) + action
    apply = struct.pack("!HH4x", 4, 8 + len(action)) + action
    match = struct.pack("!HH4x", 1, 4)
    head = struct.pack("!HBxIIHHHHH2xQQQ", 48 + len(match) + len(apply), 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0)
    return head + match + apply


def _negative_length() -> bytes:
    error = struct.pack("=iI", -17, 0x8000_0000) + bytes(12)
    return struct.pack("=IHHII", 16 + len(error), 2, 0x200, 1, 0) + error


_SCHEMA = _json({"id": 1, "result": ovs_targets._SCHEMA, "error": None})
_REQUEST = store_targets._certificates()[0]
_EC_KEY, _OTHER_KEY = bytes.fromhex("06072a8648ce3d0201"), bytes.fromhex("06072a8648ce3d0601")

REGRESSIONS: dict[str, tuple[bytes, ...]] = {
    "attachment-record": (b"\xff", _DEEP, node_targets._log_lines()[1].replace(b"10.1.1.0", b"garbage!")),
    "netlink-ack": (_negative_length(), struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -(2**31))),
    "dns-upstream-answer": (_pointer_chain(),),
    "dns-control": (
        b"\x82\xa4type\xa6tenant\xa6tenant\xa2\xff\xff",
        b"\x82\xa4type\xacstatus-query\xa1x" + b"\x91" * 50_000 + b"\xc0",
    ),
    "dns-report": (b"\x81\xa5error\xa2\xff\xff",),
    "dns-zone-cache": (struct.pack("!I", 23) + b"\x82\xa4type\xa6tenant\xa6tenant\xa2\xff\xff",),
    "openflow-flows": (_nested_conntrack(),),
    "openflow-client": (
        b"\3" + ovs_targets._multipart(2, 1, b"", more=True) + ovs_targets._multipart(2, 1, bytes(24)),
    ),
    "ovsdb-client": (
        _json({"id": 1, "result": None, "error": None}),
        _json({"id": 1, "result": {"tables": {"Port": 7}}, "error": None}),
        _SCHEMA + _json({"id": 2, "result": {"Port": 7}, "error": None}),
        _SCHEMA + _json({"id": 2, "result": {"Port": {_UUID: 7}}, "error": None}),
        _SCHEMA + _json({"id": 2, "result": {"Bridge": {_UUID: {"new": {}}}}, "error": None}),
        b'{"x":"\xff"}',
        b'{"id":' + b"1" * 5000 + b"}{}",
    ),
    "ovsdb-rows": (
        _json(
            {
                "Bridge": {
                    _UUID: {
                        "new": {
                            **ovs_targets._ROWS["Bridge"][ovs_targets._UUID + "1"]["new"],
                            "external_ids": ["map", [7]],
                        }
                    }
                }
            }
        ),
    ),
    "ovsdb-pieces": (b'{"x":' + _DEEP + b"}", b'{"x":"\xff"}' + SEPARATOR + b"{}"),
    "ovs-unixctl": (b"{}{}", b'{"method":"\\ud800"} {}'),
    "etcd-answer": (
        b'\xff{"result":',
        b"\0[",
        b"\xff" + _DEEP,
        b"\xff"
        + _json({"header": {}, "kvs": [{"key": base64.b64encode(b"/weft/\xff").decode(), "mod_revision": "5"}]}),
        b"\xff" + _json({"header": {"revision": "1"}, "more": True}),
    ),
    "remote-store-frames": (
        b"\0" + struct.pack(">I", 1) + b"\xc1",
        b"\0\xff\xff\xff\xff",
        b"\0" + struct.pack(">I", 3) + b"\x81\xa1\xff",
    ),
    "remote-store-answer": (b"\xa2\xff\xff", b"\x91" * 50_000),
    "remote-store-error": (b"\xa2\xff\xff", b"\x84\xa4code\xa2\xff\xff\xa7message\xa0"),
    "certificate": (_pem_with(_REQUEST, _EC_KEY, _OTHER_KEY), _pem_with(_REQUEST, b"\x02\x01\x00", b"\x02\x01\x20")),
    "kube-watch": (
        b'{"type":"ADDED","object":{"x":' + _DEEP,
        b'{"type":"ERROR","object":{"code":410,"message":"\xff"}}',
    ),
    "kube-pod": (b'{"message":"\xff"}', _DEEP),
    "kube-discovery": (b'{"data":{"store":5}}', b'{"status":{"authenticated":[]}}', b"[", _DEEP),
    "kubeconfig": (
        _DEEP,
        b"- " * 50_000,
        _json({**kubernetes_targets._KUBECONFIG, "users": [{"name": "u", "user": {"tokenFile": [5]}}]}),
        _json({**kubernetes_targets._KUBECONFIG, "users": [{"name": "u", "user": {"client-key": {}}}]}),
    ),
}
