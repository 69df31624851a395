"""What a space has to tell about packets: which were refused and why, and how many met what."""

from __future__ import annotations

from weft.adapters.netns.nft.policy_chains import REASONS
from weft.adapters.netns.nft.policy_maps import read_tallies
from weft.adapters.netns.tenant_netns import TenantSpace
from weft.domain.ids import TenantName
from weft.ports.datapath import Drop, Tallies


def read_drops(tenant: TenantName, space: TenantSpace) -> list[Drop]:
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
            came_by=names.get(told.came_by, ""),
            leaves_by=names.get(told.leaves_by, ""),
            at=told.at,
        )
        for told in space.refused()
    ]


def tell_tallies(tenant: TenantName, space: TenantSpace) -> Tallies:
    """See `weft.ports.datapath.Datapath.tallies`, for one tenant."""
    outcomes, reasons = read_tallies(space.netfilter)
    return Tallies(tenant=tenant, outcomes=outcomes, reasons=reasons)
