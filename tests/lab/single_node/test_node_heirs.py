"""Whoever comes to an address inherits no connection of who was there before, wherever that was."""

from __future__ import annotations

import asyncio
import socket

from tests.support.connectivity import SILENCE_S
from tests.support.modes import ON_ALL

from weft.cni.errors import CniError
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.traffic import UDP, IPAddress
from weft.lab.waiting import DEADLINE
from weft.runtime.backoff import Backoff, wait_event

PORT, OTHER_PORT = 643, 644
VIP = "10.1.0.200"


async def start(lab: NetLab) -> None:
    """A network with a group, `closed`, that lets nobody in."""
    await lab.network("net", subnet="10.1.0.0/24", gateway="10.1.0.254")
    policy = {"tenantName": "default", "policyName": "closed"}
    (await lab.rest.put("policys", **policy)).accepted()
    (await lab.rest.put("rules", **policy, ruleId="1", priority=1, direction="in", action="deny")).accepted()
    await lab.group("closed", network="net", policies=["closed"])


async def come_to(host: Host, address: object) -> Pod:
    """A pod of the closed group at an address, which may take a moment to be free."""
    backoff = Backoff(cap=0.2, within=DEADLINE)
    while True:
        try:
            return await host.pod("heir", network="net", group="closed", address=f"{address}/24")
        except CniError:
            await backoff.pause()


async def says(mouth: socket.socket, address: IPAddress | str, port: int, ear: socket.socket) -> None:
    """What one says by a socket is heard by another; it is said until then."""
    loop = asyncio.get_running_loop()
    backoff = Backoff(cap=0.2, within=DEADLINE)
    while True:
        await loop.sock_sendto(mouth, b"?", (str(address), port))
        try:
            async with asyncio.timeout(0.5):
                await loop.sock_recv(ear, 64)
                return
        except TimeoutError:
            await backoff.pause()


async def is_silent(mouth: socket.socket, address: IPAddress | str, port: int, ear: socket.socket) -> bool:
    """Whether nothing is heard of what is said by a socket a few times."""
    loop = asyncio.get_running_loop()
    hearing = asyncio.ensure_future(loop.sock_recv(ear, 64))
    for _ in range(3):
        await loop.sock_sendto(mouth, b"?", (str(address), port))
        await wait_event(asyncio.Event(), within=SILENCE_S)
    hearing.cancel()
    await asyncio.wait([hearing])
    return hearing.cancelled()


@ON_ALL
async def test_who_gets_the_address_of_a_service_is_not_called_by_its_callers(lab: NetLab) -> None:
    """CVE-2021-25736, S7: a call to a service is not judged; the same flow to a pod at its address is."""
    await start(lab)
    one = await lab.host("one")
    client, provider = await one.pod("client", network="net"), await one.pod("provider", network="net")
    service = {"tenantName": "default", "serviceName": "shop", "networkName": "net", "ipAddress": VIP}
    selected = {"selectors": ["app=web"], "ports": [f"{PORT}:{OTHER_PORT}:UDP"]}
    (await lab.rest.put("serviceLBs", **service, **selected)).accepted()
    start_of = {"Event": "start", "Tenant": "default", "EndpointID": provider.name, "Labels": {"app": "web"}}
    (await lab.rest.post("/plugin/updateEndpoint", start_of)).accepted()
    with client.place().open_caller(UDP) as caller:
        with provider.place().listening(OTHER_PORT, UDP) as ear:
            await says(caller, VIP, PORT, ear)
        (await lab.rest.delete("serviceLBs", "default:shop")).accepted()
        heir = await come_to(one, VIP)
        with heir.place().listening(PORT, UDP) as ear:
            assert await is_silent(caller, VIP, PORT, ear)


@ON_ALL
async def test_who_gets_the_address_of_a_pod_elsewhere_is_not_answered_in_its_place(lab: NetLab) -> None:
    """What answered the one who has left is a first packet for the one who has come."""
    await start(lab)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    stays, leaves = await one.pod("stays", network="net"), await two.pod("leaves", network="net", group="closed")
    address = leaves.address()
    with stays.place().listening(PORT, UDP) as server:
        with leaves.place().listening(OTHER_PORT, UDP) as client:
            await says(client, stays.address(), PORT, server)
            await says(server, address, OTHER_PORT, client)
        await leaves.remove()
        heir = await come_to(one, address)
        with heir.place().listening(OTHER_PORT, UDP) as ear:
            assert await is_silent(server, address, OTHER_PORT, ear)
