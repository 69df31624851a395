"""An item that several owners request is put once, and dropped with the last owner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import Address
from weft.domain.host_access.refcounts import HostAccessRefcounts
from weft.domain.host_access.state import ExternalAddress, HostAccessItem
from weft.domain.ids import TenantName

ITEMS: list[HostAccessItem] = [ExternalAddress(TenantName("blue"), Address(4, number), "world") for number in range(4)]
REQUESTS = st.tuples(st.sampled_from("abc"), st.frozensets(st.sampled_from(ITEMS)), st.booleans())


@given(st.lists(REQUESTS))
def test_the_state_is_the_union_of_all_requests(steps: list[tuple[str, frozenset[HostAccessItem], bool]]) -> None:
    refcounts, applied = HostAccessRefcounts(), set[HostAccessItem]()
    requested: dict[str, frozenset[HostAccessItem]] = {}
    for owner, items, refresh in [*steps, ("a", frozenset(), True)]:
        refcounts.put(owner, items)
        requested[owner] = items
        if refresh:
            delta = refcounts.refresh()
            assert applied.isdisjoint(delta.put)
            assert applied.issuperset(delta.drop)
            applied = (applied - set(delta.drop)) | set(delta.put)
            assert applied == set().union(*requested.values()) == set(refcounts.state_items())
