"""A tenant's zone, encoded for lookups: from the question as it stands in a message to the records of its answer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple, TypeVar, get_args

from weft.dns.encode import encode_name, encode_record, question_key
from weft.dns.wire import Type, labels_of
from weft.domain.addresses import BITS
from weft.domain.dns.names import EMPTY_ENTRY, Entry, Rank, Record, RecordType, Zone
from weft.domain.errors import Invalid

# How many members of a group one answer has (contiv 7.14).
MAX_ANSWERS = 10

# The records of one tenant: three times what 10,000 endpoints of two families have. About 1 KiB of memory each.
MAX_RECORDS = 250_000
# How many records change before other tenants get their turn: about 5 ms.
_STEP = 500

# Stands in the place of an entry's owner for faults of the subnets.
_SUBNETS = "subnets"

S = TypeVar("S")
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
    """The zone of one tenant. A record that is invalid, or one too many, is left out: the others stay in force."""

    def __init__(self, *, ttl: int) -> None:
        # By question: name in lower case, type and class, as they stand in a message. One dict lookup answers a query.
        self.sets: dict[bytes, RecordSet] = {}
        # Clients whose policy denies DNS to the upstreams, over UDP and over TCP: no such query of theirs is forwarded.
        self.dns_egress_denied: Counter[IPv4Address | IPv6Address] = Counter()
        self.tcp_dns_egress_denied: Counter[IPv4Address | IPv6Address] = Counter()
        self._ttl = ttl
        self._entries: dict[str, Entry] = {}
        self._subnets: tuple[str, ...] = ()
        self._prefixes: tuple[Prefix, ...] = ()
        # Several objects may have the same record: it stays until the last of them is dropped.
        self._records: dict[bytes, Counter[RankedRecord]] = {}
        # Names that have no records, but names below them that do (RFC 8020): they exist, so no NXDOMAIN for them.
        self._empty_nonterminals: Counter[bytes] = Counter()
        # How many records the entries in force have, and the entries for whose records there was no room.
        self._size = 0
        self._without_room: dict[str, None] = {}
        # By entry: how many of its records were rejected, and the first reason.
        self._rejected: dict[str, tuple[int, str]] = {}

    @property
    def zone(self) -> Zone:
        """All entries, as they were pushed."""
        return Zone(self._entries, self._subnets)

    @property
    def rejected(self) -> tuple[int, str]:
        """How many records, addresses and subnets were left out, and one of the reasons."""
        reason = next((f"{owner}: {reason}" for owner, (_, reason) in self._rejected.items()), "")
        return sum(count for count, _ in self._rejected.values()), reason

    def replace(self, zone: Zone) -> None:
        """Become this zone. Entries that are the same stay untouched."""
        for _ in self.replacing(zone):
            pass

    def replacing(self, zone: Zone) -> Iterator[None]:
        """As `replace`, in steps of a few milliseconds: other tenants are served in between."""
        prefixes, fault = _valid(parse_prefix, zone.subnets)
        self._rejected.pop(_SUBNETS, None)
        self._note(_SUBNETS, fault)
        self._subnets, self._prefixes = zone.subnets, tuple(prefixes)
        put = {owner: entry for owner, entry in zone.entries.items() if self._entries.get(owner) != entry}
        yield from self.changing(put, self._entries.keys() - zone.entries.keys())

    def change(self, put: Mapping[str, Entry], drop: Iterable[str]) -> None:
        """Put and drop entries. Dropping an absent entry is fine."""
        for _ in self.changing(put, drop):
            pass

    def changing(self, put: Mapping[str, Entry], drop: Iterable[str]) -> Iterator[None]:
        """As `change`, in steps. Each entry changes within one step."""
        touched: set[bytes] = set()
        work = 0
        for owner in (*drop, *put):
            old, new = self._entries.pop(owner, EMPTY_ENTRY), put.get(owner)
            touched |= self._remove(owner, old)
            if new is not None:
                self._entries[owner] = new
                touched |= self._add(owner, new)
            work += len(old.records) + len(new.records if new else ())
            if work >= _STEP:
                self._update_all(touched)
                touched, work = set(), 0
                yield
        # Room that became free goes to those that had none.
        for owner in tuple(self._without_room):
            if self._size + len(self._entries[owner].records) <= MAX_RECORDS:
                touched |= self._remove(owner, self._entries[owner]) | self._add(owner, self._entries[owner])
        self._update_all(touched)

    def _remove(self, owner: str, entry: Entry) -> set[bytes]:
        """Take the records of an entry out of force; returns the names whose answers change."""
        for denied, texts in self._denied_by(entry):
            _decrement(denied, _valid(ip_address, texts)[0])
        self._rejected.pop(owner, None)
        if owner in self._without_room:
            del self._without_room[owner]
            return set()
        records, _ = _valid(self._encode, entry.records)
        self._size -= len(records)
        return self._add_references(records, -1)

    def _add(self, owner: str, entry: Entry) -> set[bytes]:
        """Put the records of an entry in force; returns the names whose answers change."""
        for denied, texts in self._denied_by(entry):
            addresses, fault = _valid(ip_address, texts)
            denied.update(addresses)  # first of all, and also without room: a verdict of policy
            self._note(owner, fault)
        if self._size + len(entry.records) > MAX_RECORDS:
            self._without_room[owner] = None
            self._note(owner, (len(entry.records), f"the zone of a tenant has at most {MAX_RECORDS} records"))
            return set()
        records, fault = _valid(self._encode, entry.records)
        self._note(owner, fault)
        self._size += len(records)
        return self._add_references(records, 1)

    def _denied_by(self, entry: Entry) -> tuple[tuple[Counter[IPv4Address | IPv6Address], tuple[str, ...]], ...]:
        return (
            (self.dns_egress_denied, entry.dns_egress_denied),
            (self.tcp_dns_egress_denied, entry.tcp_dns_egress_denied),
        )

    def _note(self, owner: str, fault: tuple[int, str]) -> None:
        count, reason = self._rejected.get(owner, (0, ""))
        if fault[0]:
            self._rejected[owner] = count + fault[0], reason or fault[1]

    def _update_all(self, touched: set[bytes]) -> None:
        for name in touched:
            self._update_sets(name)

    def has_name(self, name: bytes) -> bool:
        """Whether a name exists, with records or as an empty non-terminal."""
        return name in self._records or name in self._empty_nonterminals

    def owns_reverse(self, name: bytes) -> bool:
        """Whether a name is the reverse name of something within the tenant's subnets."""
        prefix = reverse_prefix(name)
        return prefix is not None and any(prefix.is_within(subnet) for subnet in self._prefixes)

    def _encode(self, record: Record) -> tuple[bytes, RankedRecord]:
        encoded = encode_record(record, ttl=self._ttl)
        return encode_name(record.name), (record.rank, _TYPES[record.type], encoded)

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


def _valid(parse: Callable[[S], T], values: Iterable[S]) -> tuple[list[T], tuple[int, str]]:
    """The parsed values without those that are invalid; how many these are, and what is wrong with the first."""
    found: list[T] = []
    count, reason = 0, ""
    for value in values:
        try:
            found.append(parse(value))
        except (Invalid, ValueError) as error:
            count, reason = count + 1, reason or str(error)[:200]
    return found, (count, reason)


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
