"""QoS of the ports in a tenant netns: rate limits by tc, and DSCP by nft.

A port with an egress limit has an ifb device beside it: tc redirects everything that comes from the workload through
it, because Linux can only shape what a device sends. The limit towards the workload is a qdisc of the port itself. DSCP
is set by a verdict map from port to a chain per value. A tenant netns without profiles has none of this.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from weft.adapters.netns.devices import DELETED_IFB_PREFIX, IFB_PREFIX, PORT_PREFIX, REAPED_GROUP
from weft.adapters.netns.nft.entries import BRIDGE_TABLE, TABLE
from weft.domain.desired.state import QosProfile
from weft.kernel.netlink.codec import Request, to_text
from weft.kernel.netlink.link import Device, change_link, create_ifb, read_link
from weft.kernel.netlink.nft_set import (
    Element,
    SetName,
    Verdict,
    apply_changes,
    drop_elements,
    interface,
    put_elements,
    read_elements,
)
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket
from weft.kernel.netlink.tc import (
    IngressRedirect,
    Limit,
    drop_limit,
    drop_redirect,
    put_limit,
    put_redirect,
    read_limits,
    read_redirects,
)
from weft.kernel.nftables import Nftables
from weft.kernel.uapi.nf_tables import NFPROTO_BRIDGE, NFPROTO_INET, NFT_JUMP

# The same in the inet table, and in the bridge table where ports are on bridges: only there the port is known.
CHAINS: Final = {
    "dscp_mark": "set the DSCP of packets from ports with a QoS profile",
    "dscp{value}": "set one DSCP value",
}
SETS: Final = {"port_dscp": "chain of the DSCP value of a port"}

_ROUTED_DSCP: Final = SetName(NFPROTO_INET, TABLE, "port_dscp")
_BRIDGED_DSCP: Final = SetName(NFPROTO_BRIDGE, BRIDGE_TABLE, "port_dscp")
DSCP_TABLES: Final = {_ROUTED_DSCP: f"inet {TABLE}", _BRIDGED_DSCP: f"bridge {BRIDGE_TABLE}"}
_VALUE_CHAIN = "dscp"
# nft's priority `mangle`; the bridge family has no name for it.
_MANGLE = -150
_NO_DEVICE = frozenset({errno.ENODEV})


class _Limits(NamedTuple):
    """The parameters of a profile, in bits per second and bytes. `_in` is towards the workload."""

    rate: int
    burst: int
    dscp: int
    ingress_rate: int
    ingress_burst: int


class QosDriver:
    """The QoS of one tenant netns. `indexes` are its devices by name: ifb devices are added and removed here."""

    def __init__(self, *, netlink: NetlinkSocket, netfilter: NetlinkSocket, nftables: Nftables) -> None:
        self._netlink = netlink
        self._netfilter = netfilter
        self._nftables = nftables
        self._profiles: dict[str, QosProfile] = {}
        self._dscp_map = _ROUTED_DSCP
        self._dscp = read_dscp(netfilter, self._dscp_map)

    def use_bridge_table(self) -> None:
        """Set DSCP in the bridge table from now on: ports are on bridges."""
        self._dscp_map = _BRIDGED_DSCP
        self._dscp = read_dscp(self._netfilter, self._dscp_map)

    def apply(self, put: Sequence[QosProfile], drop: Sequence[QosProfile], indexes: dict[str, int]) -> None:
        """Apply some profiles and remove others. Ports that do not exist are skipped."""
        if not put and not drop:
            return
        gone: dict[str, QosProfile | None] = {
            profile.interface: None for profile in drop if self._profiles.get(profile.interface, profile) == profile
        }
        self._change(gone | {profile.interface: profile for profile in put if profile.interface in indexes}, indexes)

    def clear(self, port: str, indexes: dict[str, int]) -> None:
        """Remove whatever QoS a port has. The port may not exist any more."""
        self._change({port: None}, indexes)

    def converge(self, wanted: Iterable[QosProfile], indexes: dict[str, int]) -> list[str]:
        """Repair what differs; return the repairs."""
        by_port = {profile.interface: profile for profile in wanted if profile.interface in indexes}
        self._dscp = read_dscp(self._netfilter, self._dscp_map)
        if values := {profile.dscp for profile in by_port.values() if profile.dscp}:
            self._nftables.run(dscp_commands(values, self._dscp_map))
        actual = dict(self._read(indexes))
        limits = {port: _limits(profile) for port, profile in by_port.items()}
        changed = {
            port: by_port.get(port)
            for port in limits.keys() | actual.keys()
            if actual.get(port) is None or actual[port] != limits.get(port)
        }
        self._change(changed, indexes)
        self._profiles = by_port
        return [
            f"removed QoS of {port}" if profile is None else f"applied {profile}" for port, profile in changed.items()
        ]

    def _change(self, wanted: Mapping[str, QosProfile | None], indexes: dict[str, int]) -> None:
        """Give each of the ports its profile, or none."""
        limited = [profile for profile in wanted.values() if profile is not None and profile.rate]
        unlimited = [port for port, profile in wanted.items() if profile is None or not profile.rate]
        self._create_ifbs([ifb_name(profile.interface) for profile in limited], indexes)
        requests = [
            *_limit_egress(limited, indexes),
            *_unlimit_egress(unlimited, indexes),
            *self._change_ingress(wanted, indexes),
        ]
        if requests:
            self._netlink.send_batch(requests)
        self._change_dscp({port: 0 if profile is None else profile.dscp for port, profile in wanted.items()})
        for port, profile in wanted.items():
            self._profiles.pop(port, None)
            if profile is not None:
                self._profiles[port] = profile

    def _change_ingress(self, wanted: Mapping[str, QosProfile | None], indexes: Mapping[str, int]) -> Iterator[Request]:
        """Limit what goes to the workload: a qdisc of the port."""
        for port, profile in wanted.items():
            if port not in indexes:
                continue
            if profile is not None and profile.ingress_rate:
                yield put_limit(Limit(link=indexes[port], rate=profile.ingress_rate // 8, burst=profile.ingress_burst))
            elif port not in self._profiles or self._profiles[port].ingress_rate:
                yield drop_limit(indexes[port])

    def _read(self, indexes: Mapping[str, int]) -> Iterator[tuple[str, _Limits | None]]:
        """Yield the ports that have any QoS; None if it is incomplete."""
        limits = {limit.link: limit for limit in read_limits(self._netlink)}
        redirects = {redirect.link: redirect.into for redirect in read_redirects(self._netlink)}
        ifbs = {port_name(name): index for name, index in indexes.items() if name.startswith(IFB_PREFIX)}
        redirected = {name for name, index in indexes.items() if index in redirects}
        limited = {name: limits[index] for name, index in indexes.items() if index in limits}
        ingress = {name: (each.rate * 8, each.burst) for name, each in limited.items() if name.startswith(PORT_PREFIX)}
        for port in redirected | ifbs.keys():
            limit = limits.get(ifbs.get(port, 0))
            if limit is None or redirects.get(indexes.get(port, 0)) != limit.link:
                yield port, None
            else:
                yield port, _Limits(limit.rate * 8, limit.burst, self._dscp.get(port, 0), *ingress.get(port, (0, 0)))
        for port in (self._dscp.keys() | ingress.keys()) - ifbs.keys() - redirected:
            yield port, _Limits(0, 0, self._dscp.get(port, 0), *ingress.get(port, (0, 0)))

    def _create_ifbs(self, names: Iterable[str], indexes: dict[str, int]) -> None:
        missing = [name for name in names if name not in indexes]
        if missing:
            self._netlink.send_batch([create_ifb(Device(name=name)) for name in missing])
        for name in missing:
            link = read_link(self._netlink, name)
            assert link is not None
            indexes[name] = link.index

    def _change_dscp(self, wanted: Mapping[str, int]) -> None:
        try:
            self._replace_dscp(wanted)
        except NetlinkError as error:
            if error.errno not in {errno.ENOENT, errno.EEXIST}:
                raise
            # Somebody else has changed the map: start again from what is there.
            self._dscp = read_dscp(self._netfilter, self._dscp_map)
            self._replace_dscp(wanted)

    def _replace_dscp(self, wanted: Mapping[str, int]) -> None:
        """Replace values in one transaction, so that no packet is sent without one."""
        changed = {port: value for port, value in wanted.items() if self._dscp.get(port, 0) != value}
        put = {port: value for port, value in changed.items() if value}
        if new := set(put.values()) - set(self._dscp.values()):
            self._nftables.run(dscp_commands(new, self._dscp_map))
        drop = changed.keys() & self._dscp.keys()
        apply_changes(self._netfilter, [*_drop_dscp(drop, self._dscp_map), *_put_dscp(put, self._dscp_map)])
        self._dscp = {port: value for port, value in self._dscp.items() if port not in drop} | put


def _limits(profile: QosProfile) -> _Limits:
    return _Limits(profile.rate, profile.burst, profile.dscp, profile.ingress_rate, profile.ingress_burst)


def ifb_name(port: str) -> str:
    """Return the name of the ifb device of a port."""
    return IFB_PREFIX + port.removeprefix(PORT_PREFIX)


def port_name(ifb: str) -> str:
    """Return the name of the port of an ifb device."""
    return PORT_PREFIX + ifb.removeprefix(IFB_PREFIX)


def _limit_egress(profiles: Iterable[QosProfile], indexes: Mapping[str, int]) -> Iterator[Request]:
    """Set the limit before the redirect, so that no packet bypasses it."""
    for profile in profiles:
        port, ifb = indexes[profile.interface], indexes[ifb_name(profile.interface)]
        yield change_link(ifb, up=True)
        yield put_limit(Limit(link=ifb, rate=profile.rate // 8, burst=profile.burst))
        yield from put_redirect(IngressRedirect(link=port, into=ifb))


def _unlimit_egress(ports: Iterable[str], indexes: dict[str, int]) -> Iterator[Request]:
    """Delete the redirect, then the ifb device: in the other order the port's packets would be lost meanwhile.

    Deleting a device takes the kernel long, so it is left to the reaper.
    """
    for port in ports:
        if port in indexes:
            yield drop_redirect(indexes[port])
        ifb = indexes.pop(ifb_name(port), None)
        if ifb is not None:
            for request in (
                change_link(ifb, up=False),
                change_link(ifb, name=f"{DELETED_IFB_PREFIX}{ifb}", group=REAPED_GROUP),
            ):
                yield request._replace(ignored_errnos=_NO_DEVICE)


def dscp_commands(values: Iterable[int], target: SetName) -> str:
    """Return commands that create or update the map, its hook and the chains of these values. Elements stay."""
    table = DSCP_TABLES[target]
    return (
        f"add map {table} {target.name} {{ type ifname : verdict; }}\n"
        f"add chain {table} dscp_mark {{ type filter hook prerouting priority {_MANGLE}; policy accept; }}\n"
        f"flush chain {table} dscp_mark\n"
        f"add rule {table} dscp_mark iifname vmap @{target.name}\n"
    ) + "".join(
        f"add chain {table} {_VALUE_CHAIN}{value}\n"
        f"flush chain {table} {_VALUE_CHAIN}{value}\n"
        f"add rule {table} {_VALUE_CHAIN}{value} ip dscp set {value}\n"
        f"add rule {table} {_VALUE_CHAIN}{value} ip6 dscp set {value}\n"
        for value in sorted(values)
    )


def _put_dscp(values: Mapping[str, int], target: SetName) -> list[Request]:
    """Return requests that set the DSCP of ports that have none yet."""
    return put_elements(
        target,
        [
            Element(key=interface(port), verdict=Verdict(NFT_JUMP, f"{_VALUE_CHAIN}{value}"))
            for port, value in values.items()
        ],
    )


def _drop_dscp(ports: Iterable[str], target: SetName) -> list[Request]:
    """Return requests that delete the DSCP of ports that have one."""
    return drop_elements(target, [Element(key=interface(port)) for port in ports])


def read_dscp(netfilter: NetlinkSocket, target: SetName) -> dict[str, int]:
    """Read the DSCP of each port that has one."""
    try:
        elements = read_elements(netfilter, target)
    except NetlinkError as error:
        if error.errno != errno.ENOENT:
            raise
        # The map is only created for the first profile with a DSCP.
        return {}
    return {
        to_text(element.key): int(element.verdict.chain.removeprefix(_VALUE_CHAIN))
        for element in elements
        if element.verdict is not None
    }
