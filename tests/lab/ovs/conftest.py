"""A lab whose hosts have Open vSwitch. Prints the logs of its programs when a test fails."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from weft.lab.netlab import NetLab, open_lab


@pytest.fixture
def netmode() -> str:
    """The encapsulation of networks, unless a test overrides it."""
    return "vxlan"


@pytest.fixture
async def lab(isolated: None, netmode: str, fwdmode: str) -> AsyncIterator[NetLab]:
    async with open_lab(datapath="ovs", netmode=netmode, fwdmode=fwdmode) as lab:
        try:
            yield lab
        finally:
            lab.print_logs()
