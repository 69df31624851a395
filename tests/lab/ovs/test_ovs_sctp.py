"""Rules about ports of SCTP, of which the switch's own tracker tells none."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator

from tests.support.connectivity import SILENCE_S
from tests.support.policy_testbed import sctp_packet

from weft.domain.policy.model.protocols import SCTP
from weft.lab.hosts import Pod
from weft.lab.netlab import NetLab
from weft.lab.traffic import IPAddress
from weft.lab.waiting import DEADLINE
from weft.runtime.backoff import Backoff

CALLER, OPEN, SHUT = 40000, 8, 7
Ports = tuple[int, int]
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


def open_raw(pod: Pod, family: int) -> socket.socket:
    """Speaks and hears SCTP as the pod, whether its kernel does or not."""
    opened = pod.namespace.open_socket(FAMILIES[family], socket.SOCK_RAW, SCTP)
    opened.setblocking(False)
    opened.bind((str(pod.address(family)), 0))
    return opened


async def hears(ear: socket.socket) -> Ports | None:
    """The ports of the next packet; nothing when none comes for a while."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(SILENCE_S):
            data = await loop.sock_recv(ear, 1500)
    except TimeoutError:
        return None
    source, target = struct.unpack_from(">HH", data, (data[0] & 15) * 4 if ear.family == socket.AF_INET else 0)
    return source, target


async def is_judged(mouth: socket.socket, ear: socket.socket, where: IPAddress, *, passes: Ports, stays: Ports) -> None:
    """Return when something between two ports was heard, and something between two others was not."""
    loop = asyncio.get_running_loop()
    backoff = Backoff(cap=0.2, within=DEADLINE)
    while True:
        for ports in (stays, passes):
            await loop.sock_sendto(mouth, sctp_packet(*ports), (str(where), 0))
        heard = [ports async for ports in all_of(ear)]
        assert stays not in heard
        if passes in heard:
            return
        await backoff.pause()


async def all_of(ear: socket.socket) -> AsyncIterator[Ports]:
    while (ports := await hears(ear)) is not None:
        yield ports


async def test_ports_of_sctp_are_judged_in_both_directions(lab: NetLab) -> None:
    """What a rule says about a port holds for who calls it and for what answers from it."""
    await lab.network("net", subnet="10.1.0.0/16", gateway="10.1.255.254", ipv6Subnet="2001:db8:1::/64")
    policy = {"tenantName": "default", "policyName": "guard"}
    (await lab.rest.put("policys", **policy)).accepted()
    rule = {"ruleId": "1", "priority": 1, "direction": "in", "action": "deny", "protocol": "sctp", "port": SHUT}
    (await lab.rest.put("rules", **policy, **rule)).accepted()
    await lab.group("guarded", network="net", policies=["guard"])
    one = await lab.host("one")
    client, server = await one.pod("client", network="net"), await one.pod("server", network="net", group="guarded")
    for family in FAMILIES:
        with open_raw(client, family) as caller, open_raw(server, family) as answerer:
            there, back = server.address(family), client.address(family)
            await is_judged(caller, answerer, there, passes=(CALLER, OPEN), stays=(CALLER, SHUT))
            await is_judged(answerer, caller, back, passes=(OPEN, CALLER), stays=(SHUT, CALLER))
