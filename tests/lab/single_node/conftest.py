"""A lab for each test, in namespaces of its own. What its programs logged is shown when a test fails.

It is a usual one, unless the fixture is parametrized with another's name (`weft.lab.lab_names`). Its networks are
routed; a test that has a parameter `fwdmode` says otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from weft.lab.lab_names import lab_modes
from weft.lab.netlab import NetLab, open_lab


@pytest.fixture
def fwdmode() -> str:
    return "routing"


@pytest.fixture
async def lab(apart: None, fwdmode: str, request: pytest.FixtureRequest) -> AsyncIterator[NetLab]:
    modes = lab_modes(getattr(request, "param", "linux"), fwdmode=fwdmode)
    async with open_lab(**modes) as lab:
        try:
            yield lab
        finally:
            lab.tell_logs()
