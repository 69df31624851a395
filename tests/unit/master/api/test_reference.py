"""The generated reference pages are up to date and complete."""

from __future__ import annotations

import pytest
from tests.support.paths import DOCS

from weft.domain import kinds
from weft.domain.field_docs import MEMBERS
from weft.master.api.reference import PAGES

FOLDER = DOCS / "reference"


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_page_is_up_to_date(page: str) -> None:
    assert (FOLDER / f"{page}.md").read_text() == PAGES[page](), "run: make docs"


def test_every_member_of_every_kind_is_described() -> None:
    for kind in kinds.ALL:
        assert set(MEMBERS[kind.name]) == set(kind.type.__struct_encode_fields__)
