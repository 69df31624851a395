"""What several ask for is told once, and stays until the last of them has gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import Address
from weft.domain.host_access.refcounts import Openings
from weft.domain.host_access.state import ExternalAddress, HostPart
from weft.domain.ids import TenantName

PARTS: list[HostPart] = [ExternalAddress(TenantName("blue"), Address(4, number), "world") for number in range(4)]
ASKED = st.tuples(st.sampled_from("abc"), st.frozensets(st.sampled_from(PARTS)), st.booleans())


@given(st.lists(ASKED))
def test_what_is_told_is_what_anybody_asks_for(steps: list[tuple[str, frozenset[HostPart], bool]]) -> None:
    openings, told = Openings(), set[HostPart]()
    asked: dict[str, frozenset[HostPart]] = {}
    for who, parts, look in [*steps, ("a", frozenset(), True)]:
        openings.put(who, parts)
        asked[who] = parts
        if look:
            difference = openings.refresh()
            assert told.isdisjoint(difference.put)
            assert told.issuperset(difference.drop)
            told = (told - set(difference.drop)) | set(difference.put)
            assert told == set().union(*asked.values()) == set(openings.parts())
