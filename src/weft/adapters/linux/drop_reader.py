"""What a space has to tell about packets: which were refused and why, and how many met what."""

from __future__ import annotations

from weft.adapters.netns.nft.policy_chains import REASONS
from weft.adapters.netns.nft.policy_maps import read_tallies
from weft.adapters.netns.tenant_netns import TenantNetnsDriver
from weft.domain.ids import TenantName
from weft.ports.datapath import Drop, VerdictCounters


def read_drops(tenant: TenantName, space: TenantNetnsDriver) -> list[Drop]:
    """See `weft.ports.datapath.Datapath.drops`, for one tenant."""
    names = {index: name for name, index in space.indexes.items()}
    return [
        Drop(
            tenant=tenant,
            outcome=0 if told.mark in REASONS else told.mark,
            reason=REASONS.get(told.mark, ""),
            source=told.packet.source,
            target=told.packet.target,
            protocol=told.packet.protocol,
            source_port=told.packet.source_port,
            target_port=told.packet.target_port,
            in_iface=names.get(told.in_iface, ""),
            out_iface=names.get(told.out_iface, ""),
            at=told.at,
        )
        for told in space.refused()
    ]


def tell_tallies(tenant: TenantName, space: TenantNetnsDriver) -> VerdictCounters:
    """See `weft.ports.datapath.Datapath.counters`, for one tenant."""
    outcomes, reasons = read_tallies(space.netfilter)
    return VerdictCounters(tenant=tenant, outcomes=outcomes, reasons=reasons)
