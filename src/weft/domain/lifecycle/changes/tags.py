"""VLAN tags, VNIs and other numbers of the cluster's ranges: each is claimed by one holder."""

from __future__ import annotations

from weft.domain import kinds, model
from weft.domain.errors import Conflict, Exhausted, Invalid
from weft.domain.ids import StoreKey
from weft.domain.store_types import NEVER, Write
from weft.domain.transaction import ReadSet, put_claim
from weft.domain.validation import MAX_VLAN, parse_tag_range


def take_vlan(reading: ReadSet, *, wanted: int, holder: str) -> tuple[int, Write]:
    """Allocate a VLAN tag of the cluster's range: the requested one or, for 0, the lowest free one."""
    settings = reading.get(kinds.GLOBAL, "global") or model.Global()
    span = parse_tag_range(settings.vlans, field="vlans", highest=MAX_VLAN, widest=MAX_VLAN)
    return take_number(reading, "vlan", span, wanted=wanted, holder=holder)


def take_number(reading: ReadSet, pool: str, span: tuple[int, int], *, wanted: int, holder: str) -> tuple[int, Write]:
    """Allocate a number of a pool: the requested one or, for 0, the lowest free one; with the write of its claim."""
    first, last = span
    numbers = reading.cluster.number_pool(pool)
    if wanted:
        if not first <= wanted <= last:
            raise Invalid(f"pktTag {wanted} is outside the {pool} range {first}-{last} of the cluster", field="pktTag")
        if wanted in numbers.holders:
            raise Conflict(f"pktTag {wanted} is taken by {numbers.holders[wanted].value.holder}", field="pktTag")
        number: int | None = wanted
    else:
        number = numbers.taken.next_free(first, last)
    if number is None:
        raise Exhausted(f"no {pool} tag is free in {first}-{last}: widen the range with netctl global set")
    key = StoreKey(kinds.number_claims(pool) + str(number))
    reading.compare_revision(key, NEVER)  # of concurrent plans for one number only the first commits
    return number, put_claim(key, holder)
