"""Tenants: isolated name and address spaces that own all other objects."""

from __future__ import annotations

from typing import Any

from weft.domain import kinds, model
from weft.domain.addresses import Range, parse_prefix_or_range
from weft.domain.errors import Conflict
from weft.domain.ids import DEFAULT_TENANT
from weft.domain.kinds import Kind
from weft.domain.store_types import Delete, Write
from weft.domain.transaction import ReadSet, put

# Endpoints and rules need no check: they cannot exist without their network or policy.
_MEMBERS: tuple[Kind[Any], ...] = (
    kinds.NETWORK, kinds.GROUP, kinds.POLICY, kinds.PROFILE, kinds.SERVICE, kinds.KUBE_SERVICE,
)  # fmt: skip


def put_tenant(reading: ReadSet, wanted: model.Tenant, present: model.Tenant | None) -> list[Write]:
    """`Conflict` for external ranges of another tenant: its external addresses could be taken (CVE-2026-53935)."""
    if wanted.external_ranges:
        _refuse_shared_ranges(reading, wanted)
    return [] if wanted == present else [put(kinds.TENANT, wanted)]


def _refuse_shared_ranges(reading: ReadSet, wanted: model.Tenant) -> None:
    for other in reading.all(kinds.TENANT):
        for other_range in other.external_ranges if other.name != wanted.name else ():
            for own_range in wanted.external_ranges:
                if _range(own_range).overlaps(_range(other_range)):
                    raise Conflict(
                        f"externalRanges {own_range} overlaps {other_range} of tenant {other.name!r}: "
                        "choose another range",
                        field="externalRanges",
                    )


def _range(text: str) -> Range:
    return parse_prefix_or_range(text, field="externalRanges")


def delete_tenant(reading: ReadSet, present: model.Tenant) -> list[Write]:
    """`Conflict` while the tenant has any object, services included, and always for `default` (O1, W16)."""
    if present.name == DEFAULT_TENANT:
        raise Conflict(f"tenant {DEFAULT_TENANT!r} cannot be deleted")
    for kind in _MEMBERS:
        left = [kind.key_text(member) for member in reading.all(kind, present.name)]
        if left:
            shown = ", ".join(left[:5])
            raise Conflict(
                f"tenant {present.name!r} still has {len(left)} {kind.plural} ({shown}): delete them first",
                details={kind.plural: left[:100]},
            )
    return [Delete(kinds.TENANT.store_key(present.name))]
