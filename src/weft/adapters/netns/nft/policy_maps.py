"""Policy state as entries of nft sets and maps (`policy_chains`), and the counters read back from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from weft.adapters.netns.drop_reasons import DROP_REASONS
from weft.adapters.netns.nft.entries import Entry, set_named
from weft.adapters.netns.nft.policy_chains import DROP_COUNTERS, VERDICT_COUNTERS, enforced_set_name, policy_map_name
from weft.adapters.netns.nft.prefix_lookup import prefix_key
from weft.domain.addresses import BITS, Address, range_to_prefixes
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import CidrIdentity, IpIdentity, PolicyEntry, PolicyItem, VerdictCounter
from weft.kernel.netlink.codec import pack_address, to_int
from weft.kernel.netlink.nft_set import Element, key, mark, port, protocol, read_counts
from weft.kernel.netlink.socket import NetlinkSocket

_ENDS = ("src", "dst")
_PORT_BITS = 16
# The sets and maps that hold policy state, and so are read back. The kernel alone writes `drop_counters`.
POLICY_SETS: Final = (
    *(
        f"{name}_{end}{family}"
        for name in ("ip_identity", "cidr_host_identity", "cidr_identity")
        for end in _ENDS
        for family in (4, 6)
    ),
    *(enforced_set_name(direction) for direction in Direction),
    *(
        policy_map_name(direction, paired=paired, l4=l4)
        for direction in Direction
        for paired in (True, False)
        for l4 in ("port", "ports", "protocol", "all")
    ),
    VERDICT_COUNTERS,
)


def policy_map_entries(item: PolicyItem) -> Iterable[Entry]:
    """Return the entries of a state item. No two items that may exist together share an entry."""
    return ENTRY_BUILDERS[type(item)](item)


def _ip_identity_entries(item: IpIdentity) -> Iterator[Entry]:
    element = Element(key=pack_address(item.address), value=mark(item.identity))
    for end in _ENDS:
        yield Entry(f"ip_identity_{end}{item.address.family}", element)


def _cidr_identity_entries(item: CidrIdentity) -> Iterator[Entry]:
    family, value = item.range.family, mark(item.identity)
    for first, host_bits in range_to_prefixes(item.range.first, item.range.last, bits=BITS[family]):
        # A /32 or /128 has no middle, so it is in a map of its own.
        name, number = ("cidr_identity", prefix_key(first, host_bits)) if host_bits else ("cidr_host_identity", first)
        element = Element(key=pack_address(Address(family, number)), value=value)
        for end in _ENDS:
            yield Entry(f"{name}_{end}{family}", element)


def _policy_entry_entries(item: PolicyEntry) -> Iterator[Entry]:
    identities = [item.local] if item.remote is None else [item.local, item.remote]
    fields, value = [*map(mark, identities)], mark(item.verdict_id)
    if item.protocol is None:
        yield Entry(_map_of(item, "all"), Element(key=key(*fields), value=value))
        # The default entry of an identity also says that its direction is enforced.
        if item.remote is None:
            yield Entry(enforced_set_name(item.direction), Element(key=mark(item.local)))
        return
    fields.append(protocol(item.protocol))
    if item.ports is None:
        yield Entry(_map_of(item, "protocol"), Element(key=key(*fields), value=value))
        return
    for first, host_bits in range_to_prefixes(*item.ports, bits=_PORT_BITS):
        l4, number = ("ports", prefix_key(first, host_bits)) if host_bits else ("port", first)
        yield Entry(_map_of(item, l4), Element(key=key(*fields, port(number)), value=value))


def _verdict_counter_entries(item: VerdictCounter) -> Iterator[Entry]:
    yield Entry(VERDICT_COUNTERS, Element(key=mark(item.verdict_id)))


# Dispatch by exact type: tens of thousands of items come through here at a start.
ENTRY_BUILDERS: Final[dict[type, Callable[[Any], Iterator[Entry]]]] = {
    IpIdentity: _ip_identity_entries,
    CidrIdentity: _cidr_identity_entries,
    PolicyEntry: _policy_entry_entries,
    VerdictCounter: _verdict_counter_entries,
}


def _map_of(item: PolicyEntry, l4: str) -> str:
    return policy_map_name(item.direction, paired=item.remote is not None, l4=l4)


def read_counters(netlink: NetlinkSocket) -> tuple[dict[int, int], dict[str, int]]:
    """Read the packets by verdict id, and by drop reason of Weft's own."""
    verdicts, reasons = (
        {to_int(number): count.packets for number, count in read_counts(netlink, set_named(name)).items()}
        for name in (VERDICT_COUNTERS, DROP_COUNTERS)
    )
    # Another version of Weft may have left a reason that this one does not know.
    return verdicts, {DROP_REASONS[number]: count for number, count in reasons.items() if number in DROP_REASONS}
