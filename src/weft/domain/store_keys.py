"""Parse store keys into typed values. This is the only place that takes a key apart; `kinds` and `ipam` build keys.

A mirror passes every key of the store to every consumer, so parsing never raises: a key of another program, of a newer
Weft or of a broken writer is an `UnparsedKey`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from weft.domain import kinds
from weft.domain.addresses import Address, address_from_hex
from weft.domain.ids import (
    EndpointId,
    EndpointKey,
    GroupKey,
    GroupName,
    NetworkKey,
    NetworkName,
    NodeName,
    PolicyName,
    RuleId,
    StoreKey,
    TenantName,
)
from weft.domain.kinds import Kind


class ObjectKey(NamedTuple):
    """The key of an object: `<prefix of its kind>/<part>/…`, such as `endpoints/default/blue/4f3a`."""

    kind: Kind[Any]
    parts: tuple[str, ...]

    @property
    def tenant(self) -> TenantName:
        """The tenant of an object whose key starts with one."""
        return TenantName(self.parts[0])

    @property
    def network(self) -> NetworkKey:
        """The network that a network's or an endpoint's key names."""
        return network_key(*self.parts[:2])

    @property
    def group(self) -> GroupKey:
        tenant, group = self.parts
        return GroupKey(TenantName(tenant), GroupName(group))

    @property
    def policy(self) -> tuple[TenantName, PolicyName]:
        tenant, policy = self.parts
        return TenantName(tenant), PolicyName(policy)

    @property
    def rule(self) -> tuple[TenantName, PolicyName, RuleId]:
        tenant, policy, rule = self.parts
        return TenantName(tenant), PolicyName(policy), RuleId(rule)

    @property
    def endpoint(self) -> EndpointKey:
        tenant, network, endpoint = self.parts
        return EndpointKey(TenantName(tenant), NetworkName(network), EndpointId(endpoint))


class AddressClaimKey(NamedTuple):
    """`claims/addresses/<tenant>/<network>/<address in hex>`."""

    network: NetworkKey
    address: Address


class NumberClaimKey(NamedTuple):
    """`claims/<pool>/<number>`: a VLAN tag, a VNI or a group id."""

    pool: str
    number: int


class BlockKey(NamedTuple):
    """`blocks/<tenant>/<network>/<first address in hex>`."""

    network: NetworkKey
    first: Address


class AliveKey(NamedTuple):
    """`alive/<group>/<name>`: the leased key of a live process; the group is `nodes` or `masters`."""

    group: str
    name: str


class AppliedKey(NamedTuple):
    """`status/nodes/<node>/applied`: the revision that a node has applied."""

    node: NodeName


class SingletonKey(NamedTuple):
    """A key that exists at most once in a store, such as `leader`."""

    key: StoreKey


class UnparsedKey(NamedTuple):
    """Any other key. `reason` says what is wrong; empty for a folder or status that this version does not know."""

    reason: str = ""


_NUMBER = re.compile(r"0|[1-9]\d{0,9}", re.ASCII)

ParsedKey = ObjectKey | AddressClaimKey | NumberClaimKey | BlockKey | AliveKey | AppliedKey | SingletonKey | UnparsedKey

_UNKNOWN = UnparsedKey()


def parse_store_key(key: StoreKey) -> ParsedKey:
    """The meaning of a key. Never raises."""
    folder, *parts = key.split("/")
    # Objects come first: nearly all keys of a store are theirs, and a mirror parses each one.
    if kind := kinds.BY_PREFIX.get(folder):
        if len(parts) != len(kind.key_attributes):
            return UnparsedKey(f"the key of a {kind.name} has {len(kind.key_attributes)} parts, not {len(parts)}")
        return ObjectKey(kind, tuple(parts))
    if key in kinds.SINGLETONS:
        return SingletonKey(key)
    try:
        match folder, parts:
            case kinds.CLAIMS, ["addresses", tenant, network, address]:
                return AddressClaimKey(network_key(tenant, network), address_from_hex(address))
            case kinds.CLAIMS, [pool, number]:
                return NumberClaimKey(pool, _parse_number(number))
            case kinds.BLOCKS, [tenant, network, first]:
                return BlockKey(network_key(tenant, network), address_from_hex(first))
            case kinds.ALIVE, [group, name]:
                return AliveKey(group, name)
            case kinds.STATUS, ["nodes", node, kinds.APPLIED]:
                return AppliedKey(NodeName(node))
            case ((kinds.CLAIMS | kinds.BLOCKS | kinds.ALIVE), _):
                return UnparsedKey(f"a key under {folder}/ cannot have {len(parts)} parts")
    except ValueError as error:
        return UnparsedKey(str(error))
    return _UNKNOWN


def network_key(tenant: str, network: str) -> NetworkKey:
    """The network of two parts of a store key."""
    return NetworkKey(TenantName(tenant), NetworkName(network))


def is_transient(key: StoreKey) -> bool:
    """Whether a key belongs to a live process or to this store file, not to the cluster's state: no backup has it."""
    return key in kinds.SINGLETONS or key.split("/", 1)[0] in {kinds.ALIVE, kinds.STATUS, kinds.REQUESTS}


def _parse_number(text: str) -> int:
    # One spelling for each number: `07` beside `7` would be two claims of one tag. No tag or id has more than 32 bits.
    if not _NUMBER.fullmatch(text) or int(text) >= 1 << 32:
        raise ValueError(f"{text[:40]!r} is not the canonical form of a number")
    return int(text)
