"""The tables of one space: made and kept by us, changed in whole transactions, and watched for changes by others."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Sequence, Set

from weft.adapters.netns.host.nat_tenant import HOME_BASE, HOME_REBUILD, HOMES, HOST_SETS
from weft.adapters.netns.nft.base import BASE, REBUILD, SELF_SETS, TABLE, VOICE_SETS
from weft.adapters.netns.nft.bridge_filter import BRIDGE_BASE, BRIDGE_REBUILD, SEGMENTS, STATION_SETS
from weft.adapters.netns.nft.entries import Entry, drop_entries, put_entries, read_entries, set_named
from weft.adapters.netns.nft.policy_epoch import stamp_commands, stamp_of, stamp_requests
from weft.adapters.netns.nft.policy_maps import POLICY_SETS
from weft.adapters.netns.nft.prefix_lookup import PrefixLengthRule, way_commands, ways_of
from weft.adapters.netns.nft.service_chains import SERVICE_SETS, BackendSelector, spread_commands
from weft.adapters.netns.nft.service_maps import spreads_of
from weft.domain.errors import DatapathFault
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.nft_set import apply_changes, has_set, read_generation
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket
from weft.kernel.nftables import Nftables

SMALL_SETS = (*VOICE_SETS, *SELF_SETS, *HOST_SETS, SEGMENTS)
ALL_SETS = (*SMALL_SETS, *POLICY_SETS, *SERVICE_SETS)
_GENERATION_MASK = 0xFFFFFFFF


class NftTable:
    """The table through the sockets of its space, which others use too."""

    def __init__(self, *, netfilter: NetlinkSocket, nftables: Nftables) -> None:
        self._netfilter = netfilter
        self._nftables = nftables
        self.settle()
        # Each of our stamps comes with a generation at least, so a later process begins beyond all of them.
        self._stamped = self._generation
        self._spreads: set[BackendSelector] = set()
        self._ways: set[PrefixLengthRule] = set()
        # Whether there is a table for what passes segments.
        self.is_bridged = False
        # Whether there is a table for what is taken off the link to the host.
        self.leads_home = False

    def prepare(self) -> bool:
        """Chains and rules as they should be, in one transaction; whether entries and counts have stayed.

        Where something else is in their place, all is made anew and empty, so nobody speaks before `change`.
        """
        stamp = stamp_commands(stamp_of(self._stamped + 1))
        try:
            self._nftables.run(BASE + stamp)
            have_stayed = True
        except DatapathFault:
            self._nftables.run(REBUILD + stamp)
            have_stayed = False
        self._stamped += 1
        if self.is_bridged:
            self.bridge()
        return have_stayed

    def bridge(self) -> None:
        """The table of what passes segments, with its entries where they have stayed. To be there before a segment."""
        try:
            self._nftables.run(BRIDGE_BASE)
        except DatapathFault:
            self._nftables.run(BRIDGE_REBUILD)
        self.is_bridged = True

    def ensure_return_path(self) -> None:
        """The table of the link to the host, which is there, with its entries where they have stayed."""
        try:
            self._nftables.run(HOME_BASE)
        except DatapathFault:
            self._nftables.run(HOME_REBUILD)
        self.leads_home = True

    def ensure_lookup_rules(self, entries: Collection[Entry], *, anew: bool = False) -> None:
        """There is what leads to these entries and on from them, made anew where others may have had a hand in it."""
        if anew:
            self._spreads, self._ways = set(), set()
        spreads, ways = spreads_of(entries) - self._spreads, ways_of(entries) - self._ways
        commands = spread_commands(spreads, table=TABLE) + way_commands(ways, table=TABLE, anew=anew)
        if anew:
            # With a stamp it is a transaction even where nothing has to be changed, and counts as one of ours.
            commands += stamp_commands(stamp_of(self._stamped + 1))
            self._stamped += 1
        if commands:
            self._nftables.run(commands)
            self._spreads |= spreads
            self._ways |= ways

    def change(self, *, drop: Set[Entry], put: Set[Entry]) -> None:
        """Take entries out and put others in, at once. What is so already, also by others' doing, is fine."""
        try:
            self._commit(drop=drop - put, put=put - drop)
        except NetlinkError as refusal:
            if refusal.errno not in {errno.ENOENT, errno.EEXIST}:
                raise
            there = self.read()
            places = {entry.place for entry in drop | put}
            stale = {entry for entry in there if entry.place in places} - put
            self._commit(drop=stale, put=put - there)

    def _commit(self, *, drop: Set[Entry], put: Set[Entry]) -> None:
        if drop or put:
            self.ensure_lookup_rules(put)
            self._stamp([*drop_entries(drop), *put_entries(put)])

    def _stamp(self, requests: Sequence[Request]) -> None:
        """Carry out requests in one transaction, after which every connection is judged anew."""
        stamp = stamp_requests(stamp_of(self._stamped + 1))
        apply_changes(self._netfilter, [*requests, *stamp])
        self._stamped += 1

    def read(self, sets: Iterable[str] = ALL_SETS) -> frozenset[Entry]:
        """The entries of all or of some sets, and of the other tables; none where somebody took a table away."""
        others = (*(STATION_SETS if self.is_bridged else ()), *(HOMES if self.leads_home else ()))
        try:
            return frozenset(read_entries(self._netfilter, [*sets, *others]))
        except NetlinkError as refusal:
            if refusal.errno != errno.ENOENT:
                raise
            return frozenset()

    def exists(self) -> bool:
        """Whether the table is there, whatever is in it."""
        return has_set(self._netfilter, set_named(VOICE_SETS[0]))

    def settle(self) -> None:
        """Whatever others have changed so far is known."""
        self._generation, self._transactions = read_generation(self._netfilter), self._own_transactions()

    def is_disturbed(self) -> bool:
        """Whether others have changed anything in the namespace's nftables since `settle`."""
        passed = read_generation(self._netfilter) - self._generation & _GENERATION_MASK
        return passed > self._own_transactions() - self._transactions

    def _own_transactions(self) -> int:
        return self._netfilter.transactions + self._nftables.transactions
