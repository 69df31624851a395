"""The first packet after ADD (ADR 7): it passes on every node where policy allows it, and never where it does not.

Sent once, and at once: the other host has hardly heard of the newcomer, and perhaps not at all.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import ExitStack
from functools import partial

import pytest
import pytest_asyncio
from tests.support.connectivity import FAMILIES
from tests.support.flood import Tap
from tests.support.modes import TOWNS_ON_ALL
from tests.support.tenant_fixture import TenantFixture

from weft.kernel.netns import Namespace
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.traffic import UDP
from weft.lab.waiting import DEADLINE, until
from weft.runtime.backoff import Backoff

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    TOWNS_ON_ALL,
]

STARTS = 16
OPEN, SHUT = 8000, 6000


class Newcomer:
    """A pod that is tapped from before its ADD on."""

    def __init__(self, town: TenantFixture, host: Host, closing: ExitStack, *, number: int) -> None:
        self._town, self._host = town, host
        self._name = f"{town.tenant}-new-{host.name}-{number}"
        self._tap = closing.enter_context(Tap(closing.enter_context(Namespace.open(host.make_netns(self._name)))))
        self._heard: set[tuple[str, int]] = set()

    async def come(self) -> None:
        self.pod = await self._host.pod(self._name, tenant=self._town.tenant, network="net", group="web")

    def has_heard(self, source: Pod) -> bool:
        """Whether what is allowed has come in both families; what is not allowed must not have."""
        self._heard |= {(str(each.source), each.target_port) for each in self._tap.seen()}
        assert SHUT not in {port for _, port in self._heard}
        return {(str(source.address(family)), OPEN) for family in FAMILIES} <= self._heard


def shoot(source: Pod, target: Pod) -> None:
    """One packet to each port in each family; the forbidden one goes first."""
    for family, port in itertools.product(FAMILIES, (SHUT, OPEN)):
        with source.place(family).open_caller(UDP) as mouth:
            mouth.sendto(b"first", (str(target.address(family)), port))


@pytest_asyncio.fixture(loop_scope="module")
async def guarded(town: TenantFixture) -> TenantFixture:
    await town.policy("some", "-d in -p 1 -j deny", f"-d in -l udp -P {OPEN} -p 100 -j allow")
    await town.group("web", "some")
    return town


async def test_a_newcomer_is_heard_and_hears_at_once(lab: NetLab, guarded: TenantFixture) -> None:
    """From another host, and there: neither waits until that host has heard of the newcomer."""
    with ExitStack() as closing:
        known = [Newcomer(guarded, host, closing, number=0) for host in lab.hosts.values()]
        await meet(*known)
        one, two = lab.hosts.values()
        for number in range(1, STARTS + 1):
            for host, other in ((one, known[1]), (two, known[0])):
                new = Newcomer(guarded, host, closing, number=number)
                await new.come()
                shoot(other.pod, new.pod)
                shoot(new.pod, other.pod)
                await until(partial(have_met, new, other))


async def test_two_newcomers_never_wave_each_other_through(lab: NetLab, guarded: TenantFixture) -> None:
    """Each host knows one of them only: what is forbidden does not pass, and what is allowed passes soon."""
    with ExitStack() as closing:
        for number in range(STARTS):
            pair = [Newcomer(guarded, host, closing, number=number) for host in lab.hosts.values()]
            await meet(*pair)


async def meet(one: Newcomer, two: Newcomer) -> None:
    """Attach both at once, and have them speak until each has heard the other."""
    await asyncio.gather(one.come(), two.come())
    backoff = Backoff(first=0.002, cap=0.05, within=DEADLINE)
    while not have_met(one, two):
        shoot(one.pod, two.pod)
        shoot(two.pod, one.pod)
        await backoff.pause()


def have_met(one: Newcomer, two: Newcomer) -> bool:
    return one.has_heard(two.pod) and two.has_heard(one.pod)
