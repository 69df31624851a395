"""Service load balancing as nft chains and maps (docs/design/services.md).

Only the first packet of a connection comes here, before routing. The map `services` gives the selector id of its
frontend, which encodes the number of backends and the affinity timeout (`selector_id`). For each id in use there is a
chain that picks a backend into `meta mark`. So a lookup costs the same with ten services and with thirty thousand. No
large map holds verdicts: the kernel walks all verdicts of a table whenever a rule changes.

Policy is evaluated later, when the backend is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from weft.adapters.netns.devices import TENANT_HOST_LINK
from weft.adapters.netns.nft.commands import ADDRESS_TYPES, IP
from weft.domain.policy.model.protocols import PORTED, protocol_name

# Source address of a workload that reaches itself through a service. No device has these addresses, so the replies go
# to the default gateway, where conntrack translates them back.
HAIRPIN: Final = {4: "169.254.1.1", 6: "100::1"}

# Suffix of the maps and chains for clients that enter through the host link, where they are served otherwise than pods
# (`externalTrafficPolicy: Local`).
EXTERNAL: Final = "_external"
_SCOPES = ("", EXTERNAL)
_SCOPED_MAPS = ("services", "backends", "backend_hash", "backend_by_hash", "restricted", "service_sources")
# The sets and maps that hold service state, and so are read back.
SERVICE_SETS: Final = (
    *(f"{name}{scope}{family}" for name in _SCOPED_MAPS for scope in _SCOPES for family in (4, 6)),
    "vips4",
    "vips6",
)
SERVICE_MAPS: Final = tuple(f"services{scope}{family}" for scope in _SCOPES for family in (4, 6))
# The maps that have an element, and a chain, for each selector.
SELECTOR_MAPS: Final = tuple(f"lb_slots{scope}{family}" for scope in _SCOPES for family in (4, 6))
STATS_ORIGINAL: Final = "service_stats_orig"
STATS_REPLY: Final = "service_stats_reply"

CHAINS: Final = {
    "service_dnat": "DNAT of new connections of pods and of the host",
    "service_dnat_local": "DNAT of new connections of the tenant netns itself",
    "service_lookup{4,6}": "find the frontend of a new connection",
    "service_lb{,_external}{4,6}": "pick a backend and translate",
    "affinity_dnat{,_external}{4,6}": "translate to the backend whose hash slot is remembered",
    "lb_pick{,_external}{4,6}_{backends}_{affinity}": "pick a backend, with ClientIP affinity for some seconds",
    "no_backend_reject": "reject connections to a frontend without backends, or to no frontend of a VIP",
    "hairpin_snat": "SNAT of a workload's connection to itself through a service; clears the packet marks",
    "service_stats": "count packets of service connections",
    "service_stats{4,6}": "the same for one address family",
}
SETS: Final = {
    "affinity": "hash slot of a client's backend, by hash of client and frontend (ClientIP affinity)",
    "vips{4,6}": "addresses of services",
    "services{,_external}{4,6}": "selector id of a frontend: address, protocol and port",
    "backends{,_external}{4,6}": "address and port of a backend, by frontend and index",
    "restricted{,_external}{4,6}": "frontends that only some sources may reach (loadBalancerSourceRanges)",
    "service_sources{,_external}{4,6}": "these sources, by frontend",
    "backend_hash{,_external}{4,6}": "hash slot of a backend, by frontend and index",
    "backend_by_hash{,_external}{4,6}": "address and port of a backend, by frontend and hash slot",
    "lb_slots{,_external}{4,6}": "`lb_pick` chain of each selector id in use",
    "service_stats_orig{4,6}": "packets and bytes from clients, by client, frontend and backend",
    "service_stats_reply{4,6}": "packets and bytes to clients, by client, frontend and backend",
}

_COUNT_BITS = 12
# Limits of the maps that packets fill, so that a scan cannot exhaust the kernel's memory.
_MAX_CLIENTS = 1 << 18
_MAX_STATS = 1 << 16
_STATS_TIMEOUT = "1h"
# A client's hash has the highest bit set, so that it never equals a selector id, which is in the same mark.
_HASH_RANGE, _HASH_SEED, _HASH_OFFSET = 0x7FFFFFFF, 0x77656674, 0x80000000


def selector_id(backends: int, affinity: int) -> int:
    """Return what the map of services says about a frontend: the number of backends, and the affinity in seconds."""
    return affinity << _COUNT_BITS | backends


def declarations() -> Iterator[str]:
    """Declare the sets and maps of load balancing."""
    yield f"map affinity {{ type mark : classid; flags dynamic,timeout; timeout 1d; size {_MAX_CLIENTS}; }}"
    for family, address_type in ADDRESS_TYPES.items():
        frontend = f"{address_type} . inet_proto . inet_service"
        backend = f"{address_type} . inet_service"
        yield f"set vips{family} {{ type {address_type}; }}"
        for scope in _SCOPES:
            yield f"map services{scope}{family} {{ type {frontend} : mark; }}"
            yield f"set restricted{scope}{family} {{ type {frontend}; }}"
            yield f"set service_sources{scope}{family} {{ type {frontend} . {address_type}; flags interval; }}"
            yield f"map backends{scope}{family} {{ type {frontend} . mark : {backend}; }}"
            yield f"map backend_hash{scope}{family} {{ type {frontend} . classid : classid; }}"
            yield f"map backend_by_hash{scope}{family} {{ type {frontend} . classid : {backend}; }}"
            yield f"map lb_slots{scope}{family} {{ type mark : verdict; }}"
        for name in (STATS_ORIGINAL, STATS_REPLY):
            yield (
                f"set {name}{family} {{ type {address_type} . {frontend} . {address_type}; "
                f"flags dynamic,timeout; timeout {_STATS_TIMEOUT}; size {_MAX_STATS}; counter; }}"
            )


def chains() -> dict[str, list[str]]:
    """Return the rules by chain."""
    rules = {
        "service_dnat": [
            "type nat hook prerouting priority dstnat; policy accept;",
            *_by_family("service_lookup"),
        ],
        "service_dnat_local": [
            "type nat hook output priority -100; policy accept;",
            *_by_family("service_lookup"),
        ],
        "hairpin_snat": [
            "type nat hook postrouting priority srcnat; policy accept;",
            # The backend is picked. VXLAN and qdiscs would interpret these.
            "meta mark set 0 meta priority set none",
            *(
                f"ct status dnat {ip} saddr . {ip} daddr @hairpin_self{family} snat {ip} to {HAIRPIN[family]}"
                for family, ip in IP.items()
            ),
        ],
        "no_backend_reject": ["meta l4proto tcp reject with tcp reset", "reject"],
        "service_stats": [*_by_family("service_stats")],
    }
    for family, ip in IP.items():
        frontend = _frontend(ip)
        rules |= {
            f"service_lookup{family}": [
                # Connections of the host itself are served as those of pods.
                f'iifname "{TENANT_HOST_LINK}" {ip} saddr != @node_ips{family} meta mark set {frontend} '
                f"map @services{EXTERNAL}{family} goto service_lb{EXTERNAL}{family}",
                f"meta mark set {frontend} map @services{family} goto service_lb{family}",
                f"{ip} daddr @vips{family} goto no_backend_reject",
            ],
            f"service_stats{family}": [*_count_flows(family, ip)],
        }
        for scope in _SCOPES:
            rules |= _lb_chains(ip, f"{scope}{family}")
    return rules


def _lb_chains(ip: str, suffix: str) -> dict[str, list[str]]:
    return {
        f"service_lb{suffix}": [
            # Asked first, before translation: whoever sent the packet.
            f"{_frontend(ip)} @restricted{suffix} {_frontend(ip)} . {ip} saddr != @service_sources{suffix} drop",
            "meta mark 0 goto no_backend_reject",
            f"meta mark vmap @lb_slots{suffix}",
            *_dnat(ip, "meta mark", f"backends{suffix}"),
            # The picked backend is gone: their number has just shrunk. The first one exists while there are any.
            "meta mark set 0",
            *_dnat(ip, "meta mark", f"backends{suffix}"),
            "drop",
        ],
        f"affinity_dnat{suffix}": [*_dnat(ip, "meta priority", f"backend_by_hash{suffix}")],
    }


class BackendSelector(NamedTuple):
    """A selector id in use, and its scope: pods, or `EXTERNAL`."""

    number: int
    scope: str


def selector_commands(selectors: Iterable[BackendSelector], *, table: str) -> str:
    """Return commands that create or replace the chains of some selectors."""
    lines: list[str] = []
    for number, scope in sorted(selectors):
        backends, affinity = number & (1 << _COUNT_BITS) - 1, number >> _COUNT_BITS
        for family, ip in IP.items():
            suffix = f"{scope}{family}"
            chain = pick_chain(number, suffix)
            lines += [f"add chain inet {table} {chain}", f"flush chain inet {table} {chain}"]
            rules = (
                _pick_with_affinity(suffix, ip, backends, affinity)
                if affinity
                # `numgen` takes its modulus as a constant only, hence a chain for each number of backends.
                else [f"meta mark set numgen random mod {backends}"]
            )
            lines += [f"add rule inet {table} {chain} {rule}" for rule in rules]
            lines.append(f"add element inet {table} lb_slots{suffix} {{ {number:#x} : jump {chain} }}")
    return "".join(f"{line}\n" for line in lines)


def pick_chain(number: int, suffix: str) -> str:
    """Return the name of the chain of a selector; the suffix is that of its maps."""
    return f"lb_pick{suffix}_{number & (1 << _COUNT_BITS) - 1}_{number >> _COUNT_BITS}"


def _pick_with_affinity(suffix: str, ip: str, backends: int, affinity: int) -> list[str]:
    """Use the client's last backend if it still exists; else pick one and remember it.

    The key is a hash of client and frontend, because nft 1.0.6 aborts on larger keys of v6 in such a map. Two clients
    with the same hash, which is rare, share a backend at worst.
    """
    frontend = _frontend(ip)
    remember = f"update @affinity {{ meta mark timeout {affinity}s : meta priority }} jump affinity_dnat{suffix}"
    return [
        f"meta mark set jhash {ip} saddr . {frontend} mod {_HASH_RANGE} seed {_HASH_SEED:#x} offset {_HASH_OFFSET:#x}",
        f"meta priority set meta mark map @affinity {remember}",
        # `update` keeps the value of an element that exists, so the slot of a deleted backend has to go first.
        "delete @affinity { meta mark : meta priority }",
        f"meta priority set numgen random mod {backends}",
        f"meta priority set {frontend} . meta priority map @backend_hash{suffix} {remember}",
        "meta priority set 0",
        f"meta priority set {frontend} . meta priority map @backend_hash{suffix} {remember}",
    ]


def _frontend(ip: str) -> str:
    return f"{ip} daddr . meta l4proto . th dport"


def _dnat(ip: str, index: str, name: str) -> Iterator[str]:
    # nft only accepts a port to translate to where the protocol is given before it.
    for protocol in PORTED:
        yield f"meta l4proto {protocol_name(protocol)} dnat {ip} to {_frontend(ip)} . {index} map @{name}"


def _by_family(chain: str) -> Iterator[str]:
    for family in IP:
        yield f"meta nfproto ipv{family} goto {chain}{family}"


def _count_flows(family: int, ip: str) -> Iterator[str]:
    """Count packets and bytes of each direction by client, frontend and backend."""
    flow = (
        f"ct original {ip} saddr . ct original {ip} daddr . ct original protocol . ct original proto-dst . "
        f"ct reply {ip} saddr"
    )
    for number in PORTED:
        for direction, name in (("original", STATS_ORIGINAL), ("reply", STATS_REPLY)):
            yield (
                f"meta nfproto ipv{family} ct original protocol {protocol_name(number)} "
                f"ct direction {direction} update @{name}{family} {{ {flow} }}"
            )
