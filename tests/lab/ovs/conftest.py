"""A lab whose hosts have Open vSwitch. What its programs logged is shown when a test fails."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from weft.lab.netlab import NetLab, open_lab


@pytest.fixture
def netmode() -> str:
    """How networks leave a host, for tests that are not told otherwise."""
    return "vxlan"


@pytest.fixture
async def lab(apart: None, netmode: str, fwdmode: str) -> AsyncIterator[NetLab]:
    async with open_lab(datapath="ovs", netmode=netmode, fwdmode=fwdmode) as lab:
        try:
            yield lab
        finally:
            lab.tell_logs()
