"""Address allocation for pods (contiv 10.10): from the network, from a group's pool, requested, and exhausted."""

from __future__ import annotations

import asyncio

import pytest
from tests.support import inventory
from tests.support.modes import ALL_IN_SOAK, ON_ALL

from weft.cni.errors import CniError, Code
from weft.lab.netlab import NetLab
from weft.lab.waiting import eventually


@ALL_IN_SOAK
async def test_lowest_address_first_and_requested_address(lab: NetLab) -> None:
    """E1: the lowest address is allocated first, a requested address is honoured, and both carry traffic."""
    await lab.network("net", subnet="10.1.1.0/24", gateway="10.1.1.254")
    host = await lab.host("one")
    first = await host.pod("a", network="net")
    fifth = await host.pod("b", network="net", address="10.1.1.5")
    assert (str(first.address()), str(fifth.address())) == ("10.1.1.1", "10.1.1.5")
    assert await first.eventually_reaches(fifth)
    with pytest.raises(CniError, match=r"10\.1\.1\.5"):
        await host.pod("c", network="net", address="10.1.1.5")
    await fifth.remove()
    assert str((await host.pod("c", network="net", address="10.1.1.5")).address()) == "10.1.1.5"


@ALL_IN_SOAK
async def test_concurrent_adds_on_two_hosts_get_distinct_addresses(lab: NetLab) -> None:
    """E2, on a small subnet where nodes compete for every address."""
    await lab.network("net", subnet="10.1.1.0/24", gateway="10.1.1.254")
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    pods = await asyncio.gather(
        *(host.pod(f"{host.name}-{number}", network="net") for host in (one, two) for number in range(5))
    )
    assert len({pod.address() for pod in pods}) == 10
    assert await pods[0].eventually_reaches(pods[9])


@ALL_IN_SOAK
async def test_ipv6_addresses_are_allocated_like_ipv4(lab: NetLab) -> None:
    """E1, E2 for IPv6: lowest first, a requested address is honoured, ten concurrent ADDs on two hosts get ten."""
    await lab.network("net", subnet="10.1.1.0/24", ipv6Subnet="2001:db8:1::/64", ipv6Gateway="2001:db8:1::ffff")
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    first = await one.pod("a", network="net")
    fifth = await two.pod("b", network="net", address="2001:db8:1::5")
    assert (str(first.address(6)), str(fifth.address(6))) == ("2001:db8:1::1", "2001:db8:1::5")
    assert await first.eventually_reaches(fifth, family=6)
    with pytest.raises(CniError, match="2001:db8:1::5"):
        await one.pod("c", network="net", address="2001:db8:1::5")
    await fifth.remove()
    assert str((await one.pod("c", network="net", address="2001:db8:1::5")).address(6)) == "2001:db8:1::5"
    pods = await asyncio.gather(
        *(host.pod(f"{host.name}-{number}", network="net") for host in (one, two) for number in range(5))
    )
    assert len({pod.address(6) for pod in pods}) == 10
    assert await pods[0].eventually_reaches(pods[9], family=6)


@ALL_IN_SOAK
async def test_ipv6_exhaustion_releases_the_ipv4_address(lab: NetLab) -> None:
    """E12 for IPv6: ADD fails, its IPv4 address is released, and ADD succeeds after a DEL."""
    await lab.network("tiny", subnet="10.1.1.0/24", ipv6Subnet="2001:db8:1::/125", ipv6Gateway="2001:db8:1::6")
    host = await lab.host("one")
    pods = []
    with pytest.raises(CniError) as full:
        for number in range(9):
            pods.append(await host.pod(f"p{number}", network="tiny"))  # noqa: PERF401  the last one fails
    assert full.value.code == Code.EXHAUSTED
    await inventory.wait_consistent(lab)
    assert {held.address for held in inventory.stored(await lab.rest.state())} == {
        str(pod.address(family)) for pod in pods for family in (4, 6)
    }
    await pods[2].remove()
    late = await host.pod("late", network="tiny")
    assert late.address(6) == pods[2].address(6)
    assert await late.eventually_reaches(pods[0], family=6)


@ON_ALL
async def test_groups_with_and_without_an_address_pool(lab: NetLab) -> None:
    """B2, E5, E8: only pods of the group get addresses from its pool; an exhausted pool is code 101."""
    await lab.network("net", subnet="10.1.0.0/16", gateway="10.1.255.254")
    await lab.group("pooled", network="net", ipPool="10.1.0.1-10.1.0.4")
    await lab.group("open", network="net")
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    pooled = [await host.pod(f"p{n}", group="pooled") for n, host in enumerate((one, two, one, two))]
    free = [await host.pod(f"f{n}", group="open") for n, host in enumerate((one, two))]
    assert {str(pod.address()) for pod in pooled} == {f"10.1.0.{n}" for n in range(1, 5)}
    assert not {pod.address() for pod in free} & {pod.address() for pod in pooled}
    assert await pooled[0].eventually_reaches(pooled[1])
    assert await pooled[0].eventually_reaches(free[1])
    with pytest.raises(CniError) as full:
        await one.pod("late", group="pooled")
    assert full.value.code == Code.EXHAUSTED
    await pooled[1].remove()
    late = await one.pod("late", group="pooled")
    assert late.address() == pooled[1].address()
    assert await late.eventually_reaches(pooled[0])


@ALL_IN_SOAK
async def test_an_exhausted_network_is_usable_after_a_release(lab: NetLab) -> None:
    """E12."""
    await lab.network("tiny", subnet="10.1.1.0/29", gateway="10.1.1.6")
    host = await lab.host("one")
    pods = [await host.pod(f"p{number}", network="tiny") for number in range(5)]
    with pytest.raises(CniError) as full:
        await host.pod("late", network="tiny")
    assert full.value.code == Code.EXHAUSTED
    await pods[2].remove()
    assert (await host.pod("late", network="tiny")).address() == pods[2].address()


@ALL_IN_SOAK
async def test_a_network_in_use_is_not_deleted_and_the_agent_keeps_working(lab: NetLab) -> None:
    """W27: the deletion that stopped Contiv's agent is rejected with 409."""
    await lab.network("net", subnet="10.1.0.0/16")
    host = await lab.host("one")
    pod = await host.pod("a", network="net")
    (await lab.rest.delete("networks", "default:net")).refused(409)
    await pod.check()
    await pod.remove()
    await eventually(lambda: lab.rest.delete("networks", "default:net"), lambda answer: answer.status == 200)
    with pytest.raises(CniError, match="net"):
        await host.pod("b", network="net")
    await host.pod("c")
