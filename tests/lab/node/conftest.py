"""A lab for each test, in namespaces of its own. What its programs logged is shown when a test fails.

Its hosts have the linux datapath, unless the fixture is parametrized with the name of another, or of another and of the
mode of its networks, such as `ovs-vlan`. Its networks are routed; a test that has a parameter `fwdmode` says otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from weft.testing.netlab import NetLab, open_lab


@pytest.fixture
def fwdmode() -> str:
    return "routing"


@pytest.fixture
async def lab(apart: None, fwdmode: str, request: pytest.FixtureRequest) -> AsyncIterator[NetLab]:
    datapath, _, netmode = getattr(request, "param", "linux").partition("-")
    async with open_lab(datapath=datapath, netmode=netmode or "vxlan", fwdmode=fwdmode) as lab:
        try:
            yield lab
        finally:
            lab.tell_logs()
