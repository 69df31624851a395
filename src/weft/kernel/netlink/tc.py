"""Rate limits (tbf) and ingress redirects to an ifb (`linux/pkt_sched.h`, `pkt_cls.h`, `tc_act/tc_mirred.h`).

A qdisc shapes what a device sends, not what it receives. To limit what a port receives, an ingress filter redirects it
to the port's own ifb (see `link.create_ifb`), a tbf limits the ifb, and the packets then continue as received.

Each is one frozen value: what `read_` returns equals what `put_` wrote. `put_` and `drop_` are idempotent. Putting a
limit changes an existing one in place: packets in its queue are kept.
"""

from __future__ import annotations

import errno
import socket
import struct

import msgspec

from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.uapi.netlink import NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE
from weft.kernel.uapi.tc import (
    RTM_DELQDISC,
    RTM_GETQDISC,
    RTM_GETTFILTER,
    RTM_NEWQDISC,
    RTM_NEWTFILTER,
    TC_ACT_STOLEN,
    TC_H_INGRESS,
    TC_H_ROOT,
    TC_LINKLAYER_ETHERNET,
    TC_U32_TERMINAL,
    TCA_ACT_KIND,
    TCA_ACT_OPTIONS,
    TCA_EGRESS_REDIR,
    TCA_KIND,
    TCA_MIRRED_PARMS,
    TCA_OPTIONS,
    TCA_TBF_BURST,
    TCA_TBF_PARMS,
    TCA_TBF_RATE64,
    TCA_U32_ACT,
    TCA_U32_SEL,
)

_HEADER = struct.Struct("=BxxxiIII")  # family, device, handle, parent, info
_LIMIT_HANDLE, _INGRESS_HANDLE = 87 << 16, 0xFFFF << 16

_TBF_QOPT = struct.Struct("=BBHhHI12xIII")  # cell, link layer, overhead, alignment, least size, rate; limit, burst, mtu
_MAX_RATE32 = 0xFFFFFFFF
# The queue holds a burst and 1/20 s (50 ms) of the rate; more is dropped. Longer queues only add latency.
_QUEUE_DIVISOR = 20
_LARGEST_QUEUE = 1 << 30

_FILTER_HANDLE = 0x80000800
_FILTER_INFO = 1 << 16 | socket.htons(3)  # the first priority, and every protocol
_SELECTOR = struct.Struct("=BBBxHHhhI")  # flags, shift, keys; where the next header is
_SELECTOR_KEY = struct.Struct("=IIii")  # mask, value, offset, mask of the offset
_MATCH_ALL = _SELECTOR.pack(TC_U32_TERMINAL, 0, 1, 0, 0, 0, 0, 0) + _SELECTOR_KEY.pack(0, 0, 0, 0)
_MIRRED = struct.Struct("=IIiiiiI")  # struct tc_mirred: index, capab, action, refcnt, bindcnt, eaction, ifindex

_EXISTS = frozenset({errno.EEXIST})
_GONE = frozenset({errno.ENOENT, errno.EINVAL, errno.ENODEV})  # EINVAL: the device has no such qdisc


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A token bucket: rate in bytes per second, burst in bytes."""

    link: int
    rate: int
    burst: int

    def __str__(self) -> str:
        return f"of {self.rate} B/s with bursts of {self.burst} B for link {self.link}"


class IngressRedirect(msgspec.Struct, frozen=True, kw_only=True):
    """All packets received on `link` pass through device `into` first."""

    link: int
    into: int

    def __str__(self) -> str:
        return f"of link {self.link} into link {self.into}"


def put_limit(limit: Limit) -> Request:
    """Set the limit of a device. tbf drops packets larger than the burst."""
    # tc_ratespec.rate has 32 bits; TCA_TBF_RATE64 carries faster rates.
    rate32 = min(limit.rate, _MAX_RATE32)
    queue = limit.burst + _queue_bytes(limit.rate)
    payload = (
        _HEADER.pack(codec.AF_UNSPEC, limit.link, _LIMIT_HANDLE, TC_H_ROOT, 0)
        + codec.text(TCA_KIND, "tbf")
        + codec.nest(
            TCA_OPTIONS,
            codec.attribute(TCA_TBF_PARMS, _TBF_QOPT.pack(0, TC_LINKLAYER_ETHERNET, 0, 0, 0, rate32, queue, 0, 0)),
            codec.attribute(TCA_TBF_RATE64, struct.pack("=Q", limit.rate)),
            codec.u32(TCA_TBF_BURST, limit.burst),
        )
    )
    return Request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_REPLACE, payload, "put limit", limit)


def drop_limit(link: int) -> Request:
    """Remove the limit of a device."""
    payload = _HEADER.pack(codec.AF_UNSPEC, link, _LIMIT_HANDLE, TC_H_ROOT, 0)
    return Request(RTM_DELQDISC, 0, payload, "drop limit of", link, _GONE)


def put_redirect(redirect: IngressRedirect) -> list[Request]:
    """Set the ingress redirect of a device: an ingress qdisc, and a u32 filter that matches everything."""
    qdisc = _HEADER.pack(codec.AF_UNSPEC, redirect.link, _INGRESS_HANDLE, TC_H_INGRESS, 0) + codec.text(
        TCA_KIND, "ingress"
    )
    mirred = _MIRRED.pack(0, 0, TC_ACT_STOLEN, 0, 0, TCA_EGRESS_REDIR, redirect.into)
    action = codec.text(TCA_ACT_KIND, "mirred") + codec.nest(TCA_ACT_OPTIONS, codec.attribute(TCA_MIRRED_PARMS, mirred))
    match_all = (
        _HEADER.pack(codec.AF_UNSPEC, redirect.link, _FILTER_HANDLE, _INGRESS_HANDLE, _FILTER_INFO)
        + codec.text(TCA_KIND, "u32")
        + codec.nest(
            TCA_OPTIONS,
            codec.attribute(TCA_U32_SEL, _MATCH_ALL),
            codec.nest(TCA_U32_ACT, codec.nest(1, action)),
        )
    )
    return [
        Request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, qdisc, "add ingress qdisc to link", redirect.link, _EXISTS),
        Request(RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_REPLACE, match_all, "add ingress redirect", redirect),
    ]


def drop_redirect(link: int) -> Request:
    """Remove the ingress redirect of a device; packets in the ifb's queue are still delivered."""
    payload = _HEADER.pack(codec.AF_UNSPEC, link, _INGRESS_HANDLE, TC_H_INGRESS, 0)
    return Request(RTM_DELQDISC, 0, payload, "delete ingress qdisc of link", link, _GONE)


def read_limits(netlink: NetlinkSocket) -> list[Limit]:
    """Read our limits on all devices."""
    found = map(parse_limit, _read_qdiscs(netlink))
    return [limit for limit in found if limit is not None]


def read_redirects(netlink: NetlinkSocket) -> list[IngressRedirect]:
    """Read all our redirects; `into` is 0 when the ifb is gone and packets are dropped."""
    found: list[IngressRedirect | None] = []
    for reply in _read_qdiscs(netlink):
        _, link, handle, _, _ = codec.unpack_header(_HEADER, reply)
        if handle == _INGRESS_HANDLE:
            header = _HEADER.pack(codec.AF_UNSPEC, link, 0, _INGRESS_HANDLE, 0)
            request = Request(RTM_GETTFILTER, 0, header, "read ingress filters of link", link, _GONE)
            found += map(parse_redirect, netlink.dump(request))
    return [redirect for redirect in found if redirect is not None]


def _read_qdiscs(netlink: NetlinkSocket) -> list[bytes]:
    return netlink.dump(Request(RTM_GETQDISC, 0, _HEADER.pack(codec.AF_UNSPEC, 0, 0, 0, 0), "read", "qdiscs"))


def parse_limit(payload: bytes) -> Limit | None:
    """Decode a limit; None when the qdisc is not our root tbf."""
    _, link, handle, parent, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    if handle != _LIMIT_HANDLE or parent != TC_H_ROOT or codec.to_text(found.get(TCA_KIND)) != "tbf":
        return None
    options = codec.attributes(found.get(TCA_OPTIONS, b""))
    _, _, _, _, _, rate32, queue, _, _ = codec.unpack_header(_TBF_QOPT, options.get(TCA_TBF_PARMS, b""))
    rate = codec.to_int(options.get(TCA_TBF_RATE64)) or rate32
    # The kernel reports the burst as a rounded time. The queue length, which we made from it, is exact.
    return Limit(link=link, rate=rate, burst=queue - _queue_bytes(rate))


def parse_redirect(payload: bytes) -> IngressRedirect | None:
    """Decode an ingress redirect; None when the filter is not ours."""
    _, link, handle, _, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    if handle != _FILTER_HANDLE or codec.to_text(found.get(TCA_KIND)) != "u32":
        return None
    options = codec.attributes(found.get(TCA_OPTIONS, b""))
    first = codec.attributes(codec.attributes(options.get(TCA_U32_ACT, b"")).get(1, b""))
    mirred = codec.attributes(first.get(TCA_ACT_OPTIONS, b"")).get(TCA_MIRRED_PARMS)
    if mirred is None:
        return None
    *_, action, into = codec.unpack_header(_MIRRED, mirred)
    return IngressRedirect(link=link, into=into) if action == TCA_EGRESS_REDIR else None


def _queue_bytes(rate: int) -> int:
    """Return how many bytes may queue besides a burst."""
    return min(rate // _QUEUE_DIVISOR, _LARGEST_QUEUE)
