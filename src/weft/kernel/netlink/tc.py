"""How fast devices send, and which of them take in another's packets (`include/uapi/linux/pkt_sched.h`, `pkt_cls.h`).

The kernel limits what a device sends, not what it receives. So what comes in by a port is diverted into a device of
its own (an ifb, see `links`), is limited there as something sent, and goes on as if it had just come in by the port.

Each is one frozen value, written and read back alike: what `read_` gives equals what was put. `put_` and `drop_` name
an end state. A put limit changes one that stands: nothing that waits in its queue is lost.
"""

from __future__ import annotations

import errno
import socket
import struct

import msgspec

from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import CREATE, EXCLUSIVE, REPLACE, Request
from weft.kernel.netlink.socket import NetlinkSocket

_NEWQDISC, _DELQDISC, _GETQDISC = 36, 37, 38
_NEWFILTER, _GETFILTER = 44, 46
_HEADER = struct.Struct("=BxxxiIII")  # family, device, handle, parent, info
_KIND, _OPTIONS = 1, 2
_ROOT, _INGRESS = 0xFFFFFFFF, 0xFFFFFFF1
_LIMIT_HANDLE, _INGRESS_HANDLE = 87 << 16, 0xFFFF << 16

_BUCKET = struct.Struct("=BBHhHI12xIII")  # cell, link layer, overhead, alignment, least size, rate; limit, burst, mtu
_BUCKET_FORM, _BUCKET_RATE, _BUCKET_BURST = 1, 4, 6
_ETHERNET = 1
_LARGEST_SMALL_RATE = 0xFFFFFFFF
# Of a second's bytes one part in so many may wait, besides a burst: 50 ms. What comes on top is dropped.
_PATIENCE = 20
_LARGEST_QUEUE = 1 << 30

_FILTER_HANDLE = 0x80000800
_FILTER_INFO = 1 << 16 | socket.htons(3)  # the first priority, and every protocol
_SELECTOR = struct.Struct("=BBBxHHhhI")  # flags, shift, keys; where the next header is
_SELECTOR_KEY = struct.Struct("=IIii")  # mask, value, offset, mask of the offset
_IS_LAST = 1
_EVERYTHING = _SELECTOR.pack(_IS_LAST, 0, 1, 0, 0, 0, 0, 0) + _SELECTOR_KEY.pack(0, 0, 0, 0)
_FILTER_SELECTOR, _FILTER_ACTIONS = 5, 7
_ACTION_KIND, _ACTION_OPTIONS = 1, 2
_REDIRECTION = struct.Struct("=IIiiiiI")  # index, capabilities, verdict, two counts of users, how, device
_REDIRECTION_FORM = 2
_STOLEN, _AS_SENT = 4, 1

_STANDS = frozenset({errno.EEXIST})
_GONE = frozenset({errno.ENOENT, errno.EINVAL, errno.ENODEV})  # EINVAL: the device has nothing of the kind


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a device sends: bytes per second, and how many bytes it may send at once after a pause."""

    link: int
    rate: int
    burst: int

    def __str__(self) -> str:
        return f"of {self.rate} B/s with bursts of {self.burst} B for link {self.link}"


class IngressRedirect(msgspec.Struct, frozen=True, kw_only=True):
    """Whatever comes in by a device is sent by another one first."""

    link: int
    into: int

    def __str__(self) -> str:
        return f"of link {self.link} into link {self.into}"


def put_limit(limit: Limit) -> Request:
    """The limit, in place of any other. A packet larger than the burst is never sent."""
    small = min(limit.rate, _LARGEST_SMALL_RATE)
    queue = limit.burst + _room(limit.rate)
    payload = (
        _HEADER.pack(codec.AF_UNSPEC, limit.link, _LIMIT_HANDLE, _ROOT, 0)
        + codec.text(_KIND, "tbf")
        + codec.nest(
            _OPTIONS,
            codec.attribute(_BUCKET_FORM, _BUCKET.pack(0, _ETHERNET, 0, 0, 0, small, queue, 0, 0)),
            codec.attribute(_BUCKET_RATE, struct.pack("=Q", limit.rate)),
            codec.u32(_BUCKET_BURST, limit.burst),
        )
    )
    return Request(_NEWQDISC, CREATE | REPLACE, payload, "put limit", limit)


def drop_limit(link: int) -> Request:
    """The device sends as fast as it can."""
    payload = _HEADER.pack(codec.AF_UNSPEC, link, _LIMIT_HANDLE, _ROOT, 0)
    return Request(_DELQDISC, 0, payload, "drop limit of", link, _GONE)


def put_diversion(diversion: IngressRedirect) -> list[Request]:
    """The diversion, in place of any other of the device."""
    entrance = _HEADER.pack(codec.AF_UNSPEC, diversion.link, _INGRESS_HANDLE, _INGRESS, 0) + codec.text(
        _KIND, "ingress"
    )
    redirection = _REDIRECTION.pack(0, 0, _STOLEN, 0, 0, _AS_SENT, diversion.into)
    action = codec.text(_ACTION_KIND, "mirred") + codec.nest(
        _ACTION_OPTIONS, codec.attribute(_REDIRECTION_FORM, redirection)
    )
    everything = (
        _HEADER.pack(codec.AF_UNSPEC, diversion.link, _FILTER_HANDLE, _INGRESS_HANDLE, _FILTER_INFO)
        + codec.text(_KIND, "u32")
        + codec.nest(
            _OPTIONS,
            codec.attribute(_FILTER_SELECTOR, _EVERYTHING),
            codec.nest(_FILTER_ACTIONS, codec.nest(1, action)),
        )
    )
    return [
        Request(_NEWQDISC, CREATE | EXCLUSIVE, entrance, "open the entrance of", diversion.link, _STANDS),
        Request(_NEWFILTER, CREATE | REPLACE, everything, "put diversion", diversion),
    ]


def drop_diversion(link: int) -> Request:
    """What comes in by the device is diverted no more; what was, is on its way."""
    payload = _HEADER.pack(codec.AF_UNSPEC, link, _INGRESS_HANDLE, _INGRESS, 0)
    return Request(_DELQDISC, 0, payload, "close the entrance of", link, _GONE)


def read_limits(netlink: NetlinkSocket) -> list[Limit]:
    """The limits of all devices that have one of ours."""
    found = map(parse_limit, _read_queues(netlink))
    return [limit for limit in found if limit is not None]


def read_diversions(netlink: NetlinkSocket) -> list[IngressRedirect]:
    """All our diversions; into link 0 where the other device is gone, so that packets go nowhere."""
    found: list[IngressRedirect | None] = []
    for answer in _read_queues(netlink):
        _, link, handle, _, _ = codec.unpack_header(_HEADER, answer)
        if handle == _INGRESS_HANDLE:
            question = _HEADER.pack(codec.AF_UNSPEC, link, 0, _INGRESS_HANDLE, 0)
            request = Request(_GETFILTER, 0, question, "read diversion of", link, _GONE)
            found += map(parse_diversion, netlink.dump(request))
    return [diversion for diversion in found if diversion is not None]


def _read_queues(netlink: NetlinkSocket) -> list[bytes]:
    return netlink.dump(Request(_GETQDISC, 0, _HEADER.pack(codec.AF_UNSPEC, 0, 0, 0, 0), "read", "queues"))


def parse_limit(payload: bytes) -> Limit | None:
    """A limit, or nothing when the queue is of another kind or not at a device's only exit.

    The kernel tells a burst as a rounded time only. The queue's length, which was made from it, is exact.
    """
    _, link, handle, parent, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    if handle != _LIMIT_HANDLE or parent != _ROOT or codec.to_text(found.get(_KIND)) != "tbf":
        return None
    options = codec.attributes(found.get(_OPTIONS, b""))
    _, _, _, _, _, small, queue, _, _ = codec.unpack_header(_BUCKET, options.get(_BUCKET_FORM, b""))
    rate = codec.to_number(options.get(_BUCKET_RATE)) or small
    return Limit(link=link, rate=rate, burst=queue - _room(rate))


def parse_diversion(payload: bytes) -> IngressRedirect | None:
    """A diversion, or nothing when the filter is not the one that we put."""
    _, link, handle, _, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    if handle != _FILTER_HANDLE or codec.to_text(found.get(_KIND)) != "u32":
        return None
    options = codec.attributes(found.get(_OPTIONS, b""))
    first = codec.attributes(codec.attributes(options.get(_FILTER_ACTIONS, b"")).get(1, b""))
    form = codec.attributes(first.get(_ACTION_OPTIONS, b"")).get(_REDIRECTION_FORM)
    if form is None:
        return None
    *_, how, into = codec.unpack_header(_REDIRECTION, form)
    return IngressRedirect(link=link, into=into) if how == _AS_SENT else None


def _room(rate: int) -> int:
    """How many bytes may wait to be sent, besides a burst."""
    return min(rate // _PATIENCE, _LARGEST_QUEUE)
