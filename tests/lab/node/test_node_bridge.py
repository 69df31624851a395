"""Bridge mode: a network is a segment on every node; nobody routes between two (facts 7.5, 7.8; N3, N4, N8, N9, R9)."""

from __future__ import annotations

import asyncio

import pytest

from weft.testing.hosts import Host
from weft.testing.netlab import NetLab


@pytest.fixture
def fwdmode() -> str:
    return "bridge"


@pytest.fixture
async def hosts(lab: NetLab) -> list[Host]:
    await lab.network(
        "net",
        subnet="10.1.0.0/16",
        gateway="10.1.255.254",
        ipv6Subnet="2001:db8:1::/64",
        ipv6Gateway="2001:db8:1::ffff",
    )
    await lab.network(
        "other",
        subnet="10.2.0.0/16",
        gateway="10.2.255.254",
        ipv6Subnet="2001:db8:2::/64",
        ipv6Gateway="2001:db8:2::ffff",
    )
    return list(await asyncio.gather(lab.host("one"), lab.host("two")))


@pytest.mark.parametrize("family", [4, 6])
async def test_a_network_is_one_segment_and_networks_do_not_meet(hosts: list[Host], family: int) -> None:
    """N2, N3, N4: pods of a network reach each other, on one host and on two; those of another network never."""
    a, b, c = [await host.pod(name, network="net") for name, host in zip("abc", (*hosts, hosts[0]), strict=True)]
    d = await hosts[0].pod("d", network="other")
    for one, other in ((a, b), (b, a), (a, c), (c, b)):
        assert await one.reaches(other, family=family), (one.name, other.name)
    assert await a.never_reaches(d, family=family)
    assert await d.never_reaches(b, family=family)
