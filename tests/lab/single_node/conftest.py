"""A new lab for each test, in private namespaces. The logs of its processes are printed when a test fails.

The lab has the default mode unless the fixture is parametrized with another (`weft.lab.netlab.lab_modes`).
Networks are routed unless the test has a parameter `fwdmode`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from weft.lab.netlab import NetLab, lab_modes, open_lab


@pytest.fixture
def fwdmode() -> str:
    return "routing"


@pytest.fixture
async def lab(isolated: None, fwdmode: str, request: pytest.FixtureRequest) -> AsyncIterator[NetLab]:
    modes = lab_modes(getattr(request, "param", "linux"), fwdmode=fwdmode)
    async with open_lab(**modes) as lab:
        try:
            yield lab
        finally:
            lab.print_logs()
