"""The nft tables of one tenant netns: created, changed in whole transactions, and checked for changes by others."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Sequence, Set
from typing import Final

from weft.adapters.netns.host.nat_tenant import HOST_ACCESS_SETS, NETDEV_BASE, NETDEV_REBUILD
from weft.adapters.netns.nft.base import BASE, REBUILD
from weft.adapters.netns.nft.bridge_filter import BRIDGE_BASE, BRIDGE_REBUILD, SAME_BRIDGE
from weft.adapters.netns.nft.entries import (
    BRIDGE_SETS,
    HAIRPIN_SELF_SETS,
    L3_SPOOFGUARD_SETS,
    RETURN_IFINDEX_MAPS,
    TABLE,
    Entry,
    drop_entries,
    put_entries,
    read_entries,
    set_named,
)
from weft.adapters.netns.nft.policy_epoch import epoch_commands, epoch_mark, epoch_requests
from weft.adapters.netns.nft.policy_maps import POLICY_SETS
from weft.adapters.netns.nft.prefix_lookup import PrefixLengthRule, prefix_length_commands, prefix_length_rules
from weft.adapters.netns.nft.service_chains import (
    SELECTOR_MAPS,
    SERVICE_MAPS,
    SERVICE_SETS,
    BackendSelector,
    selector_commands,
)
from weft.adapters.netns.nft.service_maps import (
    backend_selectors,
    selector_of,
    unused_selector_commands,
)
from weft.domain.errors import DatapathFault
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.nft_set import apply_changes, has_set, read_generation
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket
from weft.kernel.nftables import Nftables

# The sets that hold a few entries per workload: cheap to read back on every convergence.
SMALL_SETS: Final = (*L3_SPOOFGUARD_SETS, *HAIRPIN_SELF_SETS, *HOST_ACCESS_SETS, SAME_BRIDGE)
ALL_SETS: Final = (*SMALL_SETS, *POLICY_SETS, *SERVICE_SETS)
# How many unused selectors are kept beside as many as are in use: services that grow and shrink need them again.
SPARE_SELECTORS: Final = 32
# The generation id of nf_tables has 32 bits and wraps.
_GENERATION_MASK: Final = 0xFFFFFFFF


class NftTable:
    """The tables, through the sockets of their netns, which others use too."""

    def __init__(self, *, netfilter: NetlinkSocket, nftables: Nftables) -> None:
        self._netfilter = netfilter
        self._nftables = nftables
        self.note_generation()
        # Every epoch takes at least one transaction, and so one generation: a later process starts beyond all epochs
        # of the earlier ones.
        self._epoch = self._generation
        self._selectors: set[BackendSelector] = set()
        # With more of them the unused ones are deleted.
        self._selector_limit = SPARE_SELECTORS
        self._prefix_rules: set[PrefixLengthRule] = set()
        # Whether the bridge table exists.
        self.has_bridge_filter = False
        # Whether the netdev table of the link to the host exists.
        self.has_return_path = False

    def prepare(self) -> bool:
        """Create or update chains and rules in one transaction; return whether entries and counters have stayed.

        If something incompatible is in their place, all is rebuilt and empty: no port can send before `change`.
        """
        epoch = epoch_commands(epoch_mark(self._epoch + 1))
        try:
            self._nftables.run(BASE + epoch)
            have_stayed = True
        except DatapathFault:
            self._nftables.run(REBUILD + epoch)
            have_stayed = False
        self._epoch += 1
        if self.has_bridge_filter:
            self.ensure_bridge_filter()
        return have_stayed

    def ensure_bridge_filter(self) -> None:
        """Create or update the bridge table. It must exist before the first bridge: no frame may go unfiltered."""
        try:
            self._nftables.run(BRIDGE_BASE)
        except DatapathFault:
            self._nftables.run(BRIDGE_REBUILD)
        self.has_bridge_filter = True

    def ensure_return_path(self) -> None:
        """Create or update the netdev table. The link to the host must exist: the chain hooks its egress."""
        try:
            self._nftables.run(NETDEV_BASE)
        except DatapathFault:
            self._nftables.run(NETDEV_REBUILD)
        self.has_return_path = True

    def ensure_lookup_rules(self, entries: Collection[Entry], *, rebuild: bool = False) -> None:
        """Create the rules and chains that the lookup of these entries needs; with `rebuild` replace existing ones."""
        if rebuild:
            self._selectors, self._prefix_rules = set(), set()
        selectors = backend_selectors(entries) - self._selectors
        prefix_rules = prefix_length_rules(entries) - self._prefix_rules
        commands = selector_commands(selectors, table=TABLE)
        commands += prefix_length_commands(prefix_rules, table=TABLE, rebuild=rebuild)
        if rebuild:
            # A new epoch makes it a transaction even if nothing changes, so that it counts as one of ours.
            commands += epoch_commands(epoch_mark(self._epoch + 1))
            self._epoch += 1
        if commands:
            self._nftables.run(commands)
            self._selectors |= selectors
            self._prefix_rules |= prefix_rules

    def change(self, *, drop: Set[Entry], put: Set[Entry]) -> None:
        """Delete and add entries in one transaction. It succeeds if others have done some of it already."""
        try:
            self._commit(drop=drop - put, put=put - drop)
        except NetlinkError as error:
            if error.errno not in {errno.ENOENT, errno.EEXIST}:
                raise
            # Somebody else has deleted or added some of it: compute the rest from what is there.
            existing = self.read()
            locations = {entry.location for entry in drop | put}
            stale = {entry for entry in existing if entry.location in locations} - put
            self._commit(drop=stale, put=put - existing)

    def _commit(self, *, drop: Set[Entry], put: Set[Entry]) -> None:
        if drop or put:
            self.ensure_lookup_rules(put)
            self._start_epoch([*drop_entries(drop), *put_entries(put)])
            if len(self._selectors) > self._selector_limit:
                self.delete_unused_selectors()

    def delete_unused_selectors(self) -> None:
        """Delete the chains that pick backends for frontends that do not exist any more, as the kernel has them.

        In a later transaction than the frontends': no packet that has found one of these misses its chain.
        """
        used = backend_selectors(read_entries(self._netfilter, SERVICE_MAPS))
        existing = [*read_entries(self._netfilter, SELECTOR_MAPS)]
        unused = [entry for entry in existing if selector_of(entry) not in used]
        if unused:
            self._nftables.run(unused_selector_commands(unused, table=TABLE))
        self._selectors &= used
        self._selector_limit = 2 * len(self._selectors) + SPARE_SELECTORS

    def _start_epoch(self, requests: Sequence[Request]) -> None:
        """Apply requests in one transaction that starts a new epoch: every connection is evaluated again."""
        epoch = epoch_requests(epoch_mark(self._epoch + 1))
        apply_changes(self._netfilter, [*requests, *epoch])
        self._epoch += 1

    def read(self, sets: Iterable[str] = ALL_SETS) -> frozenset[Entry]:
        """Read the entries of all or some sets, and of the other tables; none if somebody has deleted a table."""
        other_sets = (
            *(BRIDGE_SETS if self.has_bridge_filter else ()),
            *(RETURN_IFINDEX_MAPS if self.has_return_path else ()),
        )
        try:
            return frozenset(read_entries(self._netfilter, [*sets, *other_sets]))
        except NetlinkError as error:
            if error.errno != errno.ENOENT:
                raise
            return frozenset()

    def exists(self) -> bool:
        """Return whether the inet table exists, whatever is in it."""
        return has_set(self._netfilter, set_named(L3_SPOOFGUARD_SETS[0]))

    def note_generation(self) -> None:
        """Take the present state as known: `has_drifted` compares with it."""
        self._generation, self._transactions = read_generation(self._netfilter), self._own_transactions()

    def has_drifted(self) -> bool:
        """Return whether others have changed anything in the nftables of the netns since `note_generation`."""
        # Every transaction, of whomever, raises the generation by one.
        passed = read_generation(self._netfilter) - self._generation & _GENERATION_MASK
        return passed > self._own_transactions() - self._transactions

    def _own_transactions(self) -> int:
        return self._netfilter.transactions + self._nftables.transactions
