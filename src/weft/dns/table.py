"""A tenant's records, ready to be sent: by question, as questions and answers stand in messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple, TypeVar, get_args

from weft.dns.encode import encode_name, encode_record, question_key
from weft.dns.reverse import Prefix, parse_prefix, reverse_prefix
from weft.dns.wire import Type
from weft.domain.dns.names import Entry, Rank, RecordType, Zone
from weft.domain.errors import Invalid

# How many members of a group are told at once (contiv 7.14).
MOST_ANSWERS = 10

T = TypeVar("T")

_TYPES = {name: Type[name] for name in get_args(RecordType)}
_REVERSE = b"\4arpa\0"

# An encoded answer, its type, and the rank of who brings it.
Bearing = tuple[Rank, Type, bytes]


class RecordSet(NamedTuple):
    """Encoded answers to one question, and how many of them are given at once, chosen anew each time."""

    records: tuple[bytes, ...]
    told: int


class Table:
    """What is known of one tenant. What is put is checked first: `Invalid` changes nothing."""

    def __init__(self, *, ttl: int) -> None:
        # By question: a name in lower case, type and class, as they stand in messages.
        self.sets: dict[bytes, RecordSet] = {}
        # Whose questions about the outside stay unasked.
        self.dns_egress_denied: Counter[IPv4Address | IPv6Address] = Counter()
        self._ttl = ttl
        self._entries: dict[str, Entry] = {}
        self._subnets: tuple[str, ...] = ()
        self._prefixes: tuple[Prefix, ...] = ()
        self._bearings: dict[bytes, Counter[Bearing]] = {}
        self._below: Counter[bytes] = Counter()

    @property
    def zone(self) -> Zone:
        """All that was put."""
        return Zone(self._entries, self._subnets)

    def replace(self, zone: Zone) -> None:
        """Take in everything anew: what is not there any more is forgotten, what is the same stays untouched."""
        prefixes = tuple(map(parse_prefix, zone.subnets))
        put = {owner: entry for owner, entry in zone.entries.items() if self._entries.get(owner) != entry}
        self.change(put, self._entries.keys() - zone.entries.keys())
        self._subnets, self._prefixes = zone.subnets, prefixes

    def change(self, put: Mapping[str, Entry], drop: Iterable[str]) -> None:
        """Put and drop entries, all at once. Dropping what is absent is fine."""
        bearings = [bearing for entry in put.values() for bearing in self._bearings_of(entry)]
        dns_egress_denied = [address for entry in put.values() for address in _addresses(entry)]
        touched: set[bytes] = set()
        for owner in (*drop, *put):
            if old := self._entries.pop(owner, None):
                _release(self.dns_egress_denied, _addresses(old))
                touched |= self._count(self._bearings_of(old), -1)
        self._entries |= put
        self.dns_egress_denied.update(dns_egress_denied)
        touched |= self._count(bearings, 1)
        for name in touched:
            self._settle(name)

    def knows(self, name: bytes) -> bool:
        """Whether a name is there, be it only for what is below it."""
        return name in self._bearings or name in self._below

    def holds_reverse(self, name: bytes) -> bool:
        """Whether it is the reverse name of something within the tenant's subnets."""
        prefix = reverse_prefix(name)
        return prefix is not None and any(prefix.lies_in(each) for each in self._prefixes)

    def _bearings_of(self, entry: Entry) -> Iterator[tuple[bytes, Bearing]]:
        for record in entry.records:
            encoded = encode_record(record, ttl=self._ttl)
            yield encode_name(record.name), (record.rank, _TYPES[record.type], encoded)

    def _count(self, bearings: Iterable[tuple[bytes, Bearing]], number: int) -> set[bytes]:
        """Several objects may bring the same record: it is there until the last of them goes."""
        touched: set[bytes] = set()
        for name, bearing in bearings:
            if name not in self._bearings:
                self._bearings[name] = Counter()
                self._below.update(_above(name))
            self._bearings[name][bearing] += number
            touched.add(name)
        return touched

    def _settle(self, name: bytes) -> None:
        """Work out what is answered about a name: what its first rank brings, of each type."""
        for kind in _TYPES.values():
            self.sets.pop(question_key(name, kind), None)
        bearings = self._bearings[name] = +self._bearings[name]
        if not bearings:
            del self._bearings[name]
            _release(self._below, _above(name))
            return
        first = min(rank for rank, _, _ in bearings)
        by_type: defaultdict[Type, list[bytes]] = defaultdict(list)
        for rank, kind, encoded in bearings:
            if rank is first:
                by_type[kind].append(encoded)
        for kind, records in by_type.items():
            told = len(records) if first is Rank.CLUSTER else min(len(records), MOST_ANSWERS)
            self.sets[question_key(name, kind)] = RecordSet(tuple(records), told)


def _addresses(entry: Entry) -> list[IPv4Address | IPv6Address]:
    try:
        return [ip_address(text) for text in entry.dns_egress_denied]
    except ValueError as error:
        raise Invalid(f"{entry.dns_egress_denied!r} are not all addresses") from error


def _release(counter: Counter[T], keys: Iterable[T]) -> None:
    """Count each down; what comes to nothing is not in the counter any more."""
    for key in keys:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]


def _above(name: bytes) -> Iterator[bytes]:
    """The names that a name lies below, but the root. Of reverse names nobody asks for parts."""
    if name.endswith(_REVERSE):
        return
    while len(name := name[1 + name[0] :]) > 1:
        yield name
