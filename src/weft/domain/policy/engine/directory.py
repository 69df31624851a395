"""Everyone who can be an end of a flow, by name and by address."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import msgspec

from weft.domain.addresses import Address, parse_address
from weft.domain.errors import Invalid, NotFound
from weft.domain.ids import DEFAULT_TENANT
from weft.domain.policy.engine.decide import Flow
from weft.domain.policy.engine.rule_index import Index
from weft.domain.policy.model.identities import Identity, IdentityKey, Kind, identity_of_world
from weft.domain.policy.model.protocols import ICMP, ICMPV6


class Directory:
    """The known identities. An address belongs to a workload of the tenant, else to a host or the API server."""

    def __init__(self) -> None:
        self._identities: dict[IdentityKey, Identity] = {}
        self._by_address: Index[Address, IdentityKey] = Index()

    def copy(self) -> Self:
        """A twin that can be changed alone."""
        twin = type(self)()
        twin._identities = self._identities.copy()
        twin._by_address = self._by_address.copy()
        return twin

    def put(self, identity: Identity) -> None:
        self.remove(identity.key)
        self._identities[identity.key] = identity
        for address in identity.addresses:
            self._by_address.add(address, identity.key)

    def remove(self, key: IdentityKey) -> None:
        identity = self._identities.pop(key, None)
        for address in identity.addresses if identity else ():
            self._by_address.discard(address, key)

    def __iter__(self) -> Iterator[IdentityKey]:
        return iter(self._identities)

    def get(self, key: IdentityKey) -> Identity | None:
        return self._identities.get(key)

    def at(self, address: Address, *, tenant: str) -> Identity:
        """Who has this address, as a flow of this tenant sees it; the world where nobody does."""
        holders = [self._identities[key] for key in sorted(self._by_address[address])]
        for holder in holders:
            if holder.tenant == tenant:
                return holder
        for holder in holders:
            if holder.kind is not Kind.WORKLOAD:
                return holder
        return identity_of_world(address)

    def flow(
        self,
        source: str,
        target: str,
        *,
        protocol: int,
        port: int = 0,
        version: int | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> Flow:
        """The flow between two ends, each named by key or address.

        `tenant` says whose address is meant when neither end is a named workload. Without a version it is IPv4 where
        both ends have it. `icmp` is taken as the control messages of that version.
        """
        named = [self.get(IdentityKey(text)) for text in (source, target)]
        scope = next((end.tenant for end in named if end is not None and end.tenant), tenant)
        ends = [end or self._at_text(text, tenant=scope) for end, text in zip(named, (source, target), strict=True)]
        version = _common_version(*ends, wanted=version)
        if protocol in (ICMP, ICMPV6):
            protocol = ICMP if version == 4 else ICMPV6
        return Flow(source=ends[0], target=ends[1], protocol=protocol, port=port, version=version)

    def _at_text(self, text: str, *, tenant: str) -> Identity:
        try:
            address = parse_address(text, field="address")
        except Invalid as error:
            raise NotFound(f"{text!r} is neither a known workload nor a host nor an address") from error
        holder = self.at(address, tenant=tenant)
        # A host has several addresses: the flow uses the one that was asked for.
        return holder if holder.kind is Kind.WORKLOAD else msgspec.structs.replace(holder, addresses=(address,))


def _common_version(source: Identity, target: Identity, *, wanted: int | None) -> int:
    versions = {4, 6} if wanted is None else {wanted}
    for end in (source, target):
        if end.addresses:
            versions &= {address.family for address in end.addresses}
    if not versions:
        raise Invalid(f"{source.key} and {target.key} have no common address family", field="version")
    return min(versions)
