"""An agent restart loses no packet and lets no denied packet pass.

CVE-2023-27595: filters were removed while the agent restarted. Every packet is the first of a new connection, so each
is evaluated against the current rules.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest
from tests.support.modes import ON_OVS_TOO
from tests.support.sequence_stream import Stream

from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.traffic import UDP
from weft.lab.waiting import until

OPEN, SHUT = 5000, 6000
RATE = 1000
PACKETS = 10_000
RULES = 60


async def write_rules(lab: NetLab) -> None:
    """A group that `friends` may reach on some ports, and no other pod on any."""
    (await lab.rest.put("policys", tenantName="default", policyName="guard")).accepted()
    await lab.group("friend", network="net")
    await lab.group("guarded", network="net", policies=["guard"])
    rules: list[dict[str, object]] = [{"priority": 1, "action": "deny"}]
    rules += [
        {"priority": 2, "action": "allow", "fromEndpointGroup": "friend", "protocol": "udp", "port": OPEN + number}
        for number in range(RULES)
    ]
    for number, rule in enumerate(rules):
        key = {"tenantName": "default", "policyName": "guard", "ruleId": str(number), "direction": "in"}
        (await lab.rest.put("rules", **key, **rule)).accepted()


async def terminate(host: Host) -> None:
    """Stop the agent with SIGTERM, as an init system does."""
    os.kill(host.agent.pid, signal.SIGTERM)
    await until(lambda: not host.agent.running)


async def kill(host: Host) -> None:
    """Stop the agent with SIGKILL."""
    host.kill()


@pytest.mark.timeout(300)
@ON_OVS_TOO
@pytest.mark.parametrize("end", [terminate, kill])
async def test_no_packet_is_lost_and_none_leaks(lab: NetLab, end: Callable[[Host], Awaitable[None]]) -> None:
    """From pods on the same and on the other host, while first one agent and then the other restarts."""
    await lab.network("net", subnet="10.1.0.0/16")
    await write_rules(lab)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    near, far = [await host.pod(f"friend-{host.name}", group="friend", network="net") for host in (one, two)]
    target = await one.pod("target", group="guarded", network="net")
    for friend in (near, far):
        assert await friend.eventually_reaches(target, port=OPEN, transport=UDP)
    with ExitStack() as stack:

        def stream(source: Pod, port: int) -> Stream:
            return stack.enter_context(Stream(source.place(), target.place(), port=port, rate=RATE))

        allowed = [stream(near, OPEN), stream(far, OPEN + 1)]
        forbidden = [stream(near, SHUT), stream(far, SHUT + 1)]
        for host in (one, two):
            await until(lambda: all(each.arrived for each in allowed))
            await end(host)
            await host.start()
        await until(lambda: all(each.sent >= PACKETS for each in (*allowed, *forbidden)))
        for each in (*allowed, *forbidden):
            each.stop()
        assert [await each.missing() for each in allowed] == [[], []]
        assert [each.arrived for each in forbidden] == [0, 0]
