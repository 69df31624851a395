"""Identity classes: equivalence classes of endpoints and addresses that no rule distinguishes.

A datapath knows a class by its numeric identity. A class consists of everything a rule can match on: the sets its
members belong to, the address sets that contain their address, and their ports with a name that some rule uses. The
same facts are the index terms (`Term`) by which rules find classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from hashlib import blake2b

import msgspec

from weft.domain.model import PodPort
from weft.domain.policy.model.identities import Kind
from weft.domain.policy.model.ranges import AddressSet
from weft.domain.policy.model.rules import Direction, FlowRule, MemberSet, Peer
from weft.domain.policy.policymap.policy_state import UNKNOWN_IDENTITY, WORKLOAD


class IdentityKind(StrEnum):
    """What the members of a class are. UNKNOWN_IDENTITY: an address in a tenant subnet without a known endpoint."""

    WORKLOAD = Kind.WORKLOAD
    HOST = Kind.HOST
    API_SERVER = Kind.API_SERVER
    WORLD = Kind.WORLD
    UNKNOWN_IDENTITY = "unknown"


# The flag bits of the numeric identities of some kinds.
FLAGS = {IdentityKind.WORKLOAD: WORKLOAD, IdentityKind.UNKNOWN_IDENTITY: UNKNOWN_IDENTITY}


class NodeHost(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """The index term of a node's host."""

    node: str


# What an index finds a class by. A string is a port name.
Term = MemberSet | AddressSet | NodeHost | str


class TermTexts:
    """The texts of sets and address sets: a digest of each, computed once for all the classes that have it."""

    def __init__(self) -> None:
        self._texts: dict[MemberSet | AddressSet, str] = {}

    def of(self, term: MemberSet | AddressSet) -> str:
        text = self._texts.get(term)
        if text is None:
            # The type is part of the text, because two kinds of sets may have equal members.
            content = f"{type(term).__name__} {msgspec.json.encode(term).decode()}"
            text = self._texts[term] = blake2b(content.encode(), digest_size=16).hexdigest()
        return text


class IdentityClass(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True, gc=False):
    """One equivalence class. `node` is set for hosts only."""

    kind: IdentityKind
    sets: frozenset[MemberSet] = frozenset()
    addresses: frozenset[AddressSet] = frozenset()
    ports: frozenset[PodPort] = frozenset()
    node: str = ""

    def terms(self) -> Iterator[Term]:
        """Yield every term by which a rule can find the class."""
        yield from self.sets
        yield from self.addresses
        if self.ports:
            # A set, because several ports may have one name.
            yield from {port.name for port in self.ports}
        if self.kind is IdentityKind.HOST:
            yield NodeHost(self.node)

    def text(self, texts: TermTexts) -> str:
        """Return the canonical text of the class: the same on every node and unique, as its id is a hash of it."""
        sets = sorted(map(texts.of, self.sets))
        addresses = sorted(map(texts.of, self.addresses))
        ports = sorted(msgspec.json.encode(port).decode() for port in self.ports)
        return msgspec.json.encode((self.kind, self.node, sets, addresses, ports)).decode()

    def is_peer(self, peer: Peer) -> bool:
        """Return whether a rule's peer matches the class."""
        return (peer.members is None or peer.members in self.sets) and (
            peer.addresses is None or peer.addresses in self.addresses
        )


def matches_any_peer(rule: FlowRule) -> bool:
    """Return whether the rule matches every remote identity."""
    return rule.peers is None or any(peer.members is None and peer.addresses is None for peer in rule.peers)


def remote_terms(rule: FlowRule) -> Iterator[tuple[Term, Peer | None]]:
    """Yield the terms of the remote classes for which the rule gives another verdict than for all others.

    A class with the term matches; if a peer comes with the term, only a class that is that peer. A rule for any peer
    still depends on the named ports of the destination, which is the remote end for egress rules.
    """
    if not matches_any_peer(rule):
        for peer in rule.peers or ():
            if peer.members is None:
                yield peer.addresses or AddressSet(), None
            else:
                yield peer.members, None if peer.addresses is None else peer
    elif rule.direction is Direction.EGRESS:
        for name in {service.name for service in rule.services or () if service.name}:
            yield name, None
