"""Netprofiles: bandwidth, burst and DSCP of groups."""

from __future__ import annotations

from weft.domain import kinds, model
from weft.domain.errors import Conflict
from weft.domain.store_types import Delete, Write
from weft.domain.transaction import ReadSet, put


def put_profile(reading: ReadSet, wanted: model.Profile, present: model.Profile | None) -> list[Write]:
    reading.require(kinds.TENANT, wanted.tenant, field="tenantName")
    return [] if wanted == present else [put(kinds.PROFILE, wanted)]


def delete_profile(reading: ReadSet, present: model.Profile) -> list[Write]:
    """`Conflict` while a group uses it (O19, Q6)."""
    # Compared by prefix: a group that starts to use it meanwhile fails the commit.
    groups = [
        kinds.GROUP.key_text(group)
        for group in reading.all(kinds.GROUP, present.tenant)
        if group.net_profile == present.name
    ]
    if groups:
        raise Conflict(
            f"netprofile {present.name!r} is used by {', '.join(groups[:5])}: detach it first",
            details={"groups": groups[:100]},
        )
    return [Delete(kinds.PROFILE.store_key(present.tenant, present.name))]
