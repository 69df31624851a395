"""Keeps the table `inet weft_vxlan` in step with the nodes and workloads of the cluster (`vtep_ruleset`).

The table exists while the agent is installed: also without an overlay, a process of the node must not send to the
tunnels of others. Its sets are filled before its chains exist, and a new peer is added before routes lead to it: no
packet of a known node is lost.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterable, Set
from contextlib import suppress

from weft.adapters.netns.drop_reasons import DROP_REASONS, NFLOG_GROUP
from weft.adapters.netns.host.vtep_ruleset import (
    DROP_COUNTERS,
    ENTRY_SETS,
    VTEP_TABLE,
    VtepConfig,
    VtepEntry,
    chain_commands,
    declare_commands,
    entries_of,
    redeclare_commands,
)
from weft.domain.desired.state import Overlay, StateItem
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.kernel.netlink.codec import to_int
from weft.kernel.netlink.nflog import PacketLog
from weft.kernel.netlink.nft_set import (
    SetName,
    apply_changes,
    drop_elements,
    has_set,
    put_elements,
    read_counts,
    read_elements,
    read_generation,
)
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket
from weft.kernel.netns import Namespace
from weft.kernel.nftables import open_nftables
from weft.kernel.uapi.netlink import NETLINK_NETFILTER
from weft.kernel.uapi.nf_tables import NFPROTO_INET
from weft.ports.datapath import Drop, VerdictCounters

# These drops belong to the node, not to a tenant.
_NO_TENANT = TenantName("")
_MAX_LOG_DATAGRAMS = 64
_VNI_MAP = "vni_tenants"


class VtepGuard:
    """See the module. `admit` comes before the devices and routes of new items, `dismiss` after those of old ones."""

    def __init__(self, namespace: Namespace, config: VtepConfig) -> None:
        self._namespace = namespace
        self._config = config
        self._netfilter = NetlinkSocket(NETLINK_NETFILTER, namespace=namespace)
        self._nftables = open_nftables(namespace)
        self._items: set[StateItem] = set()
        self._overlays: dict[int, Overlay] = {}
        # The number of items that need each entry.
        self._entries: Counter[VtepEntry] = Counter()
        # Whether this process has created or updated the table, and nobody has deleted it as far as we know.
        self._ready = False
        self._generation = 0
        self._log: PacketLog | None = None

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._nftables.close()
        self._netfilter.close()

    def admit(self, items: Iterable[StateItem]) -> None:
        """Add the entries of new items."""
        was_receiving, new = bool(self._overlays), [item for item in items if item not in self._items]
        # A VNI that another tenant had until now.
        former = {self._overlays[item.vni] for item in new if isinstance(item, Overlay) and item.vni in self._overlays}
        removed, added = self._forget(former), self._count(new)
        if self._ready and bool(self._overlays) == was_receiving:
            self._change(put=added, drop=removed)
        else:
            # The table of an earlier agent keeps its elements until `converge` knows what is needed.
            self._install(remove_others=False)

    def dismiss(self, items: Iterable[StateItem]) -> None:
        """Remove the entries of items that are gone."""
        was_receiving, removed = bool(self._overlays), self._forget(items)
        if self._ready:
            self._change(put=frozenset(), drop=removed)
            if bool(self._overlays) != was_receiving:
                self._write_chains()

    def converge(self, desired: Iterable[StateItem]) -> list[str]:
        """Make the table what these items need; return the repairs."""
        self._items.clear()
        self._overlays.clear()
        self._entries.clear()
        self._count(desired)
        repaired = [] if self._has_table() else [f"created table inet {VTEP_TABLE}"]
        return [f"host: {repair}" for repair in repaired + self._install(remove_others=True)]

    def remove(self) -> list[str]:
        """Delete the table; return what was done."""
        self._ready = False
        if not self._has_table():
            return []
        self._nftables.run(f"delete table inet {VTEP_TABLE}\n")
        return [f"host: removed table inet {VTEP_TABLE}"]

    def has_drifted(self) -> bool:
        """Return whether others have deleted the table, as a firewall does that replaces the ruleset."""
        generation = read_generation(self._netfilter)
        changed, self._generation = generation != self._generation, generation
        return changed and self._ready and not self._has_table()

    def drops(self) -> list[Drop]:
        """Read the packets dropped since the last call, or a sample of them."""
        if not self._ready:
            return []
        return [
            Drop(
                tenant=_NO_TENANT,
                verdict_id=0,
                reason=DROP_REASONS.get(logged.mark, ""),
                source=logged.packet.source,
                target=logged.packet.target,
                protocol=logged.packet.protocol,
                source_port=logged.packet.source_port,
                target_port=logged.packet.target_port,
                at=logged.at,
            )
            for logged in self._open_log().read(most=_MAX_LOG_DATAGRAMS)
        ]

    def counters(self) -> list[VerdictCounters]:
        """Read the packets by drop reason."""
        if not self._ready:
            return []
        try:
            counts = read_counts(self._netfilter, SetName(NFPROTO_INET, VTEP_TABLE, DROP_COUNTERS))
        except NetlinkError as error:
            if error.errno != errno.ENOENT:
                raise
            return []
        reasons = {DROP_REASONS[to_int(number)]: count.packets for number, count in counts.items()}
        return [VerdictCounters(tenant=_NO_TENANT, verdicts={}, reasons=reasons)]

    def _count(self, items: Iterable[StateItem]) -> set[VtepEntry]:
        """Note items with entries, and return the entries that are new."""
        added = set[VtepEntry]()
        for item in items:
            entries = [*entries_of(item, self._config)]
            if not entries or item in self._items:
                continue
            self._items.add(item)
            if isinstance(item, Overlay):
                self._overlays[item.vni] = item
            added.update(entry for entry in entries if entry not in self._entries)
            self._entries.update(entries)
        return added

    def _forget(self, items: Iterable[StateItem]) -> set[VtepEntry]:
        """The reverse: return the entries that no item needs any more."""
        removed = set[VtepEntry]()
        for item in self._items.intersection(items):
            self._items.discard(item)
            if isinstance(item, Overlay):
                del self._overlays[item.vni]
            for entry in entries_of(item, self._config):
                self._entries[entry] -= 1
                if not self._entries[entry]:
                    del self._entries[entry]
                    removed.add(entry)
        return removed

    def _has_table(self) -> bool:
        return has_set(self._netfilter, SetName(NFPROTO_INET, VTEP_TABLE, _VNI_MAP))

    def _install(self, *, remove_others: bool) -> list[str]:
        """Create or update sets, elements and chains, in this order; return the changes of an existing table."""
        wanted = self._entries.keys()
        try:
            self._nftables.run(declare_commands(self._config))
            existing = self._read()
        except DatapathFault:
            # Made by another version, or for a VTEP of the other address family.
            self._nftables.run(redeclare_commands(self._config))
            existing = set()
        moved = {entry.element.key for entry in wanted - existing if entry.name == _VNI_MAP}
        stale = {entry for entry in existing - wanted if remove_others or entry.element.key in moved}
        self._commit(put=wanted - existing, drop=stale)
        self._write_chains()
        with suppress(NetlinkError):  # another process has bound the group: `drops` reports it
            self._open_log()
        was_ready, self._ready = self._ready, True
        changes = ((wanted - existing, "added"), (stale, "removed"))
        return [f"{what} {len(entries)} entries of {VTEP_TABLE}" for entries, what in changes if entries and was_ready]

    def _write_chains(self) -> None:
        self._nftables.run(chain_commands(self._config, receiving=bool(self._overlays)))

    def _read(self) -> set[VtepEntry]:
        return {
            VtepEntry(name, element)
            for name in ENTRY_SETS
            for element in read_elements(self._netfilter, SetName(NFPROTO_INET, VTEP_TABLE, name))
        }

    def _change(self, *, put: Set[VtepEntry], drop: Set[VtepEntry]) -> None:
        try:
            self._commit(put=put, drop=drop)
        except NetlinkError as error:
            if error.errno not in {errno.ENOENT, errno.EEXIST}:
                raise
            # Somebody else has changed the table.
            self._install(remove_others=True)

    def _commit(self, *, put: Set[VtepEntry], drop: Set[VtepEntry]) -> None:
        requests = [
            request
            for entries, make in ((drop, drop_elements), (put, put_elements))
            for name in sorted({entry.name for entry in entries})
            for request in make(
                SetName(NFPROTO_INET, VTEP_TABLE, name), [each.element for each in entries if each.name == name]
            )
        ]
        apply_changes(self._netfilter, requests)

    def _open_log(self) -> PacketLog:
        if self._log is None:
            self._log = PacketLog(NFLOG_GROUP, namespace=self._namespace)
        return self._log
