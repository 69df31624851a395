"""A tenant's zone, encoded for lookups: from the question as it stands in a message to the records of its answer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple, TypeVar, get_args

from weft.dns.encode import encode_name, encode_record, question_key
from weft.dns.wire import Type, labels_of
from weft.domain.addresses import BITS
from weft.domain.dns.names import Entry, Rank, RecordType, Zone
from weft.domain.errors import Invalid

# How many members of a group one answer has (contiv 7.14).
MAX_ANSWERS = 10

T = TypeVar("T")

_TYPES = {name: Type[name] for name in get_args(RecordType)}
_ARPA = b"\4arpa\0"
# The reverse zones: address family, bits per label, and the base in which a label is written.
_REVERSE_ZONES = {(b"in-addr", b"arpa"): (4, 8, 10), (b"ip6", b"arpa"): (6, 4, 16)}

# An encoded record with its type, and the rank of the object that has it.
RankedRecord = tuple[Rank, Type, bytes]


class RecordSet(NamedTuple):
    """Encoded records that answer one question. An answer has `answer_count` of them, sampled each time."""

    records: tuple[bytes, ...]
    answer_count: int


class Prefix(NamedTuple):
    """An IP prefix."""

    family: int
    base: int
    length: int

    def is_within(self, other: Prefix) -> bool:
        return (
            self.family == other.family
            and self.length >= other.length
            and (self.base ^ other.base) >> (BITS[self.family] - other.length) == 0
        )


class Table:
    """The zone of one tenant. Entries are checked before anything changes: after `Invalid` all is as before."""

    def __init__(self, *, ttl: int) -> None:
        # By question: name in lower case, type and class, as they stand in a message. One dict lookup answers a query.
        self.sets: dict[bytes, RecordSet] = {}
        # Clients whose policy denies DNS to the upstreams: no query of theirs is forwarded.
        self.dns_egress_denied: Counter[IPv4Address | IPv6Address] = Counter()
        self._ttl = ttl
        self._entries: dict[str, Entry] = {}
        self._subnets: tuple[str, ...] = ()
        self._prefixes: tuple[Prefix, ...] = ()
        # Several objects may have the same record: it stays until the last of them is dropped.
        self._records: dict[bytes, Counter[RankedRecord]] = {}
        # Names that have no records, but names below them that do (RFC 8020): they exist, so no NXDOMAIN for them.
        self._empty_nonterminals: Counter[bytes] = Counter()

    @property
    def zone(self) -> Zone:
        """All entries."""
        return Zone(self._entries, self._subnets)

    def replace(self, zone: Zone) -> None:
        """Become this zone. Entries that are the same stay untouched."""
        prefixes = tuple(map(parse_prefix, zone.subnets))
        put = {owner: entry for owner, entry in zone.entries.items() if self._entries.get(owner) != entry}
        self.change(put, self._entries.keys() - zone.entries.keys())
        self._subnets, self._prefixes = zone.subnets, prefixes

    def change(self, put: Mapping[str, Entry], drop: Iterable[str]) -> None:
        """Put and drop entries, all at once. Dropping an absent entry is fine."""
        # Encoding raises `Invalid`, so it is done for all entries before the first change.
        records = [record for entry in put.values() for record in self._encode(entry)]
        denied = [address for entry in put.values() for address in _denied_addresses(entry)]
        touched: set[bytes] = set()
        for owner in (*drop, *put):
            if old := self._entries.pop(owner, None):
                _decrement(self.dns_egress_denied, _denied_addresses(old))
                touched |= self._add_references(self._encode(old), -1)
        self._entries |= put
        self.dns_egress_denied.update(denied)
        touched |= self._add_references(records, 1)
        for name in touched:
            self._update_sets(name)

    def has_name(self, name: bytes) -> bool:
        """Whether a name exists, with records or as an empty non-terminal."""
        return name in self._records or name in self._empty_nonterminals

    def owns_reverse(self, name: bytes) -> bool:
        """Whether a name is the reverse name of something within the tenant's subnets."""
        prefix = reverse_prefix(name)
        return prefix is not None and any(prefix.is_within(subnet) for subnet in self._prefixes)

    def _encode(self, entry: Entry) -> Iterator[tuple[bytes, RankedRecord]]:
        for record in entry.records:
            encoded = encode_record(record, ttl=self._ttl)
            yield encode_name(record.name), (record.rank, _TYPES[record.type], encoded)

    def _add_references(self, records: Iterable[tuple[bytes, RankedRecord]], count: int) -> set[bytes]:
        touched: set[bytes] = set()
        for name, record in records:
            if name not in self._records:
                self._records[name] = Counter()
                self._empty_nonterminals.update(_ancestors(name))
            self._records[name][record] += count
            touched.add(name)
        return touched

    def _update_sets(self, name: bytes) -> None:
        """Compute the answers about a name: of each type, the records of the first rank."""
        for kind in _TYPES.values():
            self.sets.pop(question_key(name, kind), None)
        records = self._records[name] = +self._records[name]  # unary plus drops what has no reference left
        if not records:
            del self._records[name]
            _decrement(self._empty_nonterminals, _ancestors(name))
            return
        first = min(rank for rank, _, _ in records)
        by_type: defaultdict[Type, list[bytes]] = defaultdict(list)
        for rank, kind, encoded in records:
            if rank is first:
                by_type[kind].append(encoded)
        for kind, found in by_type.items():
            # Kubernetes' DNS specification demands all addresses of a headless service.
            count = len(found) if first is Rank.CLUSTER else min(len(found), MAX_ANSWERS)
            self.sets[question_key(name, kind)] = RecordSet(tuple(found), count)


def parse_prefix(text: str) -> Prefix:
    """A subnet from its text, or `Invalid`."""
    try:
        network = ip_network(text)
    except ValueError as error:
        raise Invalid(f"{text[:80]!r} is not a subnet") from error
    return Prefix(network.version, int(network.network_address), network.prefixlen)


def reverse_prefix(name: bytes) -> Prefix | None:
    """The prefix that a name under in-addr.arpa or ip6.arpa stands for; None for any other name."""
    *labels, second, first = [b"", b"", *labels_of(name)]
    if (second, first) not in _REVERSE_ZONES:
        return None
    family, width, base = _REVERSE_ZONES[second, first]
    number = length = 0
    for label in reversed(labels[2:]):
        # `int` takes signs, blanks and underscores, which are not part of a reverse name.
        if not label.isalnum() or len(label) > 3 or length == BITS[family]:
            return None
        try:
            value = int(label, base)
        except ValueError:
            return None
        if value >> width:
            return None
        number, length = number << width | value, length + width
    return Prefix(family, number << (BITS[family] - length), length)


def _denied_addresses(entry: Entry) -> list[IPv4Address | IPv6Address]:
    try:
        return [ip_address(text) for text in entry.dns_egress_denied]
    except ValueError as error:
        raise Invalid(f"{entry.dns_egress_denied!r} are not all addresses") from error


def _decrement(counter: Counter[T], keys: Iterable[T]) -> None:
    """Count each key down, and drop those that reach zero."""
    for key in keys:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]


def _ancestors(name: bytes) -> Iterator[bytes]:
    """The names above a name, without the root."""
    # Clients do not query parts of reverse names, and one IPv6 name has 33 ancestors.
    if name.endswith(_ARPA):
        return
    while len(name := name[1 + name[0] :]) > 1:
        yield name
