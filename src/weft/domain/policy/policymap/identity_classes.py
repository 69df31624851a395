"""Classes: ends of flows that no rule can tell apart. A datapath knows a class by its number.

What rules can see of an end is a class's whole content: the sets it is a member of, the sets of addresses that hold its
address, and the ports it gives a name that some rule uses. These are also the `Term`s by which rules find classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from weft.domain.model import PodPort
from weft.domain.policy.model.identities import Kind
from weft.domain.policy.model.ranges import AddressSet
from weft.domain.policy.model.rules import Direction, FlowRule, MemberSet, Peer
from weft.domain.policy.policymap.policy_state import UNKNOWN_IDENTITY, WORKLOAD


class IdentityKind(StrEnum):
    """What an end is, beside what rules see of it. A stranger has an address of ours that nobody here has."""

    WORKLOAD = Kind.WORKLOAD
    HOST = Kind.HOST
    API_SERVER = Kind.API_SERVER
    WORLD = Kind.WORLD
    UNKNOWN_IDENTITY = "stranger"


# The bits that some kinds of ends have in their numbers.
FLAGS = {IdentityKind.WORKLOAD: WORKLOAD, IdentityKind.UNKNOWN_IDENTITY: UNKNOWN_IDENTITY}


class OnNode(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """The host of this node, as a term."""

    node: str


# What a class can be found by; a text is the name of a port.
Term = MemberSet | AddressSet | OnNode | str


class IdentityClass(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Ends that are alike. `node` is that of a host."""

    standing: IdentityKind
    sets: frozenset[MemberSet] = frozenset()
    addresses: frozenset[AddressSet] = frozenset()
    ports: frozenset[PodPort] = frozenset()
    node: str = ""

    def terms(self) -> Iterator[Term]:
        """Everything that a rule can find the class by."""
        yield from self.sets
        yield from self.addresses
        yield from {port.name for port in self.ports}
        if self.standing is IdentityKind.HOST:
            yield OnNode(self.node)

    def text(self) -> str:
        """The class in words, the same on every node; no two classes share them."""
        sets = sorted(msgspec.json.encode(each).decode() for each in self.sets)
        ports = sorted(msgspec.json.encode(each).decode() for each in self.ports)
        addresses = sorted(map(str, self.addresses))
        return msgspec.json.encode((self.standing, self.node, sets, addresses, ports)).decode()

    def is_peer(self, peer: Peer) -> bool:
        """Whether the description of an end fits."""
        return (peer.members is None or peer.members in self.sets) and (
            peer.addresses is None or peer.addresses in self.addresses
        )


def speaks_of_all(rule: FlowRule) -> bool:
    """Whether the rule is about everyone as the remote end."""
    return rule.peers is None or any(peer.members is None and peer.addresses is None for peer in rule.peers)


def remote_terms(rule: FlowRule) -> Iterator[Term]:
    """By what to find the classes that the rule, as their peers' rule, tells from everyone else.

    A rule about everyone still tells those apart who give a port a name that it uses, when they are the target.
    """
    if not speaks_of_all(rule):
        for peer in rule.peers or ():
            yield peer.members if peer.members is not None else peer.addresses or AddressSet()
    elif rule.direction is Direction.EGRESS:
        yield from {service.name for service in rule.services or () if service.name}
