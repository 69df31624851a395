"""Shapes in a tenant's space: how fast packets come from a port, and which DSCP they bear.

A port with a limit has a device beside it, its meter, through which everything goes that comes from the workload (see
`shaping`). Marks are set by nftables (see `marking`). A space without shapes has nothing of all this.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from weft.adapters.netns.kernel_state import REAPED_GROUP
from weft.adapters.netns.nft.policy_chains import PORT_PREFIX
from weft.adapters.netns.qos.dscp import BRIDGED_MARKS, ROUTED_MARKS, drop_marks, marking, put_marks, read_marks
from weft.domain.desired.state import QosProfile
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.link import Device, alter_link, create_ifb, read_link
from weft.kernel.netlink.nft_set import apply_changes
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket
from weft.kernel.netlink.tc import (
    IngressRedirect,
    Limit,
    drop_diversion,
    drop_limit,
    put_diversion,
    put_limit,
    read_diversions,
    read_limits,
)
from weft.kernel.nftables import Nftables

METER_PREFIX = "wi"
_LEAVING_PREFIX = "wmgone"
_GONE = frozenset({errno.ENODEV})


class _Terms(NamedTuple):
    """What a shape asks for."""

    rate: int
    burst: int
    dscp: int
    rate_in: int
    burst_in: int


class QosDriver:
    """The shapes of one space. `indexes` are always those of its devices by name: meters join and leave them here."""

    def __init__(self, *, netlink: NetlinkSocket, netfilter: NetlinkSocket, nftables: Nftables) -> None:
        self._netlink = netlink
        self._netfilter = netfilter
        self._nftables = nftables
        self._shapes: dict[str, QosProfile] = {}
        self._place = ROUTED_MARKS
        self._marks = read_marks(netfilter, self._place)

    def bridge(self) -> None:
        """Ports are on segments from now on."""
        self._place = BRIDGED_MARKS
        self._marks = read_marks(self._netfilter, self._place)

    def apply(self, put: Sequence[QosProfile], drop: Sequence[QosProfile], indexes: dict[str, int]) -> None:
        """Give ports these shapes and take those away. No other port is touched, and none that is not there."""
        if not put and not drop:
            return
        gone: dict[str, QosProfile | None] = {
            shape.interface: None for shape in drop if self._shapes.get(shape.interface, shape) == shape
        }
        self._reshape(gone | {shape.interface: shape for shape in put if shape.interface in indexes}, indexes)

    def clear(self, port: str, indexes: dict[str, int]) -> None:
        """Take away whatever shape a port has; it may be gone already."""
        self._reshape({port: None}, indexes)

    def converge(self, wanted: Iterable[QosProfile], indexes: dict[str, int]) -> list[str]:
        """Mend what differs; what was mended."""
        by_port = {shape.interface: shape for shape in wanted if shape.interface in indexes}
        self._marks = read_marks(self._netfilter, self._place)
        if values := {shape.dscp for shape in by_port.values() if shape.dscp}:
            self._nftables.run(marking(values, self._place))
        found, terms = dict(self._read(indexes)), {port: _terms(shape) for port, shape in by_port.items()}
        changed = {
            port: by_port.get(port)
            for port in terms.keys() | found.keys()
            if found.get(port) is None or found[port] != terms.get(port)
        }
        self._reshape(changed, indexes)
        self._shapes = by_port
        return [f"removed the shape of {port}" if shape is None else f"put {shape}" for port, shape in changed.items()]

    def _reshape(self, wanted: Mapping[str, QosProfile | None], indexes: dict[str, int]) -> None:
        """What each of the ports is to have from now on."""
        limited = [shape for shape in wanted.values() if shape is not None and shape.rate]
        others = [port for port, shape in wanted.items() if shape is None or not shape.rate]
        self._make_meters([meter_name(shape.interface) for shape in limited], indexes)
        requests = [*_limit(limited, indexes), *_free(others, indexes), *self._inward(wanted, indexes)]
        if requests:
            self._netlink.send_batch(requests)
        self._mark({port: 0 if shape is None else shape.dscp for port, shape in wanted.items()})
        for port, shape in wanted.items():
            self._shapes.pop(port, None)
            if shape is not None:
                self._shapes[port] = shape

    def _inward(self, wanted: Mapping[str, QosProfile | None], indexes: Mapping[str, int]) -> Iterator[Request]:
        """What a port sends to its workload is limited at the port itself."""
        for port, shape in wanted.items():
            if port not in indexes:
                continue
            if shape is not None and shape.rate_in:
                yield put_limit(Limit(link=indexes[port], rate=shape.rate_in // 8, burst=shape.burst_in))
            elif port not in self._shapes or self._shapes[port].rate_in:
                yield drop_limit(indexes[port])

    def _read(self, indexes: Mapping[str, int]) -> Iterator[tuple[str, _Terms | None]]:
        """The ports that have something of a shape, with its terms if it is a whole one."""
        limits = {limit.link: limit for limit in read_limits(self._netlink)}
        diversions = {diversion.link: diversion.into for diversion in read_diversions(self._netlink)}
        meters = {port_name(name): index for name, index in indexes.items() if name.startswith(METER_PREFIX)}
        diverted = {name for name, index in indexes.items() if index in diversions}
        ports = {name: limits[index] for name, index in indexes.items() if index in limits}
        into = {name: (each.rate * 8, each.burst) for name, each in ports.items() if name.startswith(PORT_PREFIX)}
        for port in diverted | meters.keys():
            limit = limits.get(meters.get(port, 0))
            if limit is None or diversions.get(indexes.get(port, 0)) != limit.link:
                yield port, None
            else:
                yield port, _Terms(limit.rate * 8, limit.burst, self._marks.get(port, 0), *into.get(port, (0, 0)))
        for port in (self._marks.keys() | into.keys()) - meters.keys() - diverted:
            yield port, _Terms(0, 0, self._marks.get(port, 0), *into.get(port, (0, 0)))

    def _make_meters(self, names: Iterable[str], indexes: dict[str, int]) -> None:
        missing = [name for name in names if name not in indexes]
        if missing:
            self._netlink.send_batch([create_ifb(Device(name=name)) for name in missing])
        for name in missing:
            link = read_link(self._netlink, name)
            assert link is not None
            indexes[name] = link.index

    def _mark(self, wanted: Mapping[str, int]) -> None:
        try:
            self._change_marks(wanted)
        except NetlinkError as refusal:
            if refusal.errno not in {errno.ENOENT, errno.EEXIST}:
                raise
            self._marks = read_marks(self._netfilter, self._place)  # somebody else has changed them
            self._change_marks(wanted)

    def _change_marks(self, wanted: Mapping[str, int]) -> None:
        """Old marks and new ones in one transaction: no packet goes without."""
        changed = {port: value for port, value in wanted.items() if self._marks.get(port, 0) != value}
        put = {port: value for port, value in changed.items() if value}
        if new := set(put.values()) - set(self._marks.values()):
            self._nftables.run(marking(new, self._place))
        drop = changed.keys() & self._marks.keys()
        apply_changes(self._netfilter, [*drop_marks(drop, self._place), *put_marks(put, self._place)])
        self._marks = {port: value for port, value in self._marks.items() if port not in drop} | put


def _terms(shape: QosProfile) -> _Terms:
    return _Terms(shape.rate, shape.burst, shape.dscp, shape.rate_in, shape.burst_in)


def meter_name(port: str) -> str:
    return METER_PREFIX + port.removeprefix(PORT_PREFIX)


def port_name(meter: str) -> str:
    return PORT_PREFIX + meter.removeprefix(METER_PREFIX)


def _limit(shapes: Iterable[QosProfile], indexes: Mapping[str, int]) -> Iterator[Request]:
    """Limit before diverting: no packet passes by."""
    for shape in shapes:
        port, meter = indexes[shape.interface], indexes[meter_name(shape.interface)]
        yield alter_link(meter, up=True)
        yield put_limit(Limit(link=meter, rate=shape.rate // 8, burst=shape.burst))
        yield from put_diversion(IngressRedirect(link=port, into=meter))


def _free(ports: Iterable[str], indexes: dict[str, int]) -> Iterator[Request]:
    """Divert no more, then take the meter away: in the other order the port would be cut off meanwhile.

    Deleting a device takes the kernel long, so that is left to the reaper.
    """
    for port in ports:
        if port in indexes:
            yield drop_diversion(indexes[port])
        meter = indexes.pop(meter_name(port), None)
        if meter is not None:
            for request in (
                alter_link(meter, up=False),
                alter_link(meter, name=f"{_LEAVING_PREFIX}{meter}", group=REAPED_GROUP),
            ):
                yield request._replace(settled=_GONE)
