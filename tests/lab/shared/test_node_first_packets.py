"""The first packet after ADD (ADR 7): it arrives on every node if policy allows it, and never if policy denies it.

It is sent once and immediately, when the other host may not know the new endpoint yet.
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
OPEN, CLOSED = 8000, 6000


class NewPod:
    """A pod with a packet tap that is opened before its ADD."""

    def __init__(self, testbed: TenantFixture, host: Host, closing: ExitStack, *, number: int) -> None:
        self._testbed, self._host = testbed, host
        self._name = f"{testbed.tenant}-new-{host.name}-{number}"
        self._tap = closing.enter_context(Tap(closing.enter_context(Namespace.open(host.make_netns(self._name)))))
        self._received: set[tuple[str, int]] = set()

    async def attach(self) -> None:
        self.pod = await self._host.pod(self._name, tenant=self._testbed.tenant, network="net", group="web")

    def has_received_from(self, source: Pod) -> bool:
        """Whether allowed packets arrived in both families. Denied packets must not arrive."""
        self._received |= {(str(each.source), each.target_port) for each in self._tap.packets()}
        assert CLOSED not in {port for _, port in self._received}
        return {(str(source.address(family)), OPEN) for family in FAMILIES} <= self._received


def send_once(source: Pod, target: Pod) -> None:
    """Send one packet to each port in each family, the denied port first."""
    for family, port in itertools.product(FAMILIES, (CLOSED, OPEN)):
        with source.place(family).open_client(UDP) as sender:
            sender.sendto(b"first", (str(target.address(family)), port))


@pytest_asyncio.fixture(loop_scope="module")
async def policed_tenant(testbed: TenantFixture) -> TenantFixture:
    await testbed.policy("some", "-d in -p 1 -j deny", f"-d in -l udp -P {OPEN} -p 100 -j allow")
    await testbed.group("web", "some")
    return testbed


async def test_first_packet_to_and_from_a_new_pod_is_delivered(lab: NetLab, policed_tenant: TenantFixture) -> None:
    """To and from a pod on another host: delivery does not wait until that host knows the new endpoint."""
    with ExitStack() as closing:
        known = [NewPod(policed_tenant, host, closing, number=0) for host in lab.hosts.values()]
        await attach_and_exchange(*known)
        one, two = lab.hosts.values()
        for number in range(1, STARTS + 1):
            for host, other in ((one, known[1]), (two, known[0])):
                new = NewPod(policed_tenant, host, closing, number=number)
                await new.attach()
                send_once(other.pod, new.pod)
                send_once(new.pod, other.pod)
                await until(partial(both_received, new, other))


async def test_two_new_pods_on_different_hosts_obey_policy(lab: NetLab, policed_tenant: TenantFixture) -> None:
    """Each host knows one of them only: denied packets never pass, and allowed packets pass soon."""
    with ExitStack() as closing:
        for number in range(STARTS):
            pair = [NewPod(policed_tenant, host, closing, number=number) for host in lab.hosts.values()]
            await attach_and_exchange(*pair)


async def attach_and_exchange(one: NewPod, two: NewPod) -> None:
    """Attach both concurrently, and send until each has received a packet of the other."""
    await asyncio.gather(one.attach(), two.attach())
    backoff = Backoff(first=0.002, cap=0.05, within=DEADLINE)
    while not both_received(one, two):
        send_once(one.pod, two.pod)
        send_once(two.pod, one.pod)
        await backoff.pause()


def both_received(one: NewPod, two: NewPod) -> bool:
    return one.has_received_from(two.pod) and two.has_received_from(one.pod)
