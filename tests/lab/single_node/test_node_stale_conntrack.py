"""A pod that reuses an address inherits no conntrack entry of its previous owner, on any node."""

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
    """Create a network with a group, `closed`, that denies all ingress."""
    await lab.network("net", subnet="10.1.0.0/24", gateway="10.1.0.254")
    policy = {"tenantName": "default", "policyName": "closed"}
    (await lab.rest.put("policys", **policy)).accepted()
    (await lab.rest.put("rules", **policy, ruleId="1", priority=1, direction="in", action="deny")).accepted()
    await lab.group("closed", network="net", policies=["closed"])


async def pod_with_address(host: Host, address: object) -> Pod:
    """Create a pod of the closed group with an address; retry until the address is released."""
    backoff = Backoff(cap=0.2, within=DEADLINE)
    while True:
        try:
            return await host.pod("reuser", network="net", group="closed", address=f"{address}/24")
        except CniError:
            await backoff.pause()


async def send_until_received(
    sender: socket.socket, address: IPAddress | str, port: int, listener: socket.socket
) -> None:
    """Send datagrams until the listener receives one."""
    loop = asyncio.get_running_loop()
    backoff = Backoff(cap=0.2, within=DEADLINE)
    while True:
        await loop.sock_sendto(sender, b"?", (str(address), port))
        try:
            async with asyncio.timeout(0.5):
                await loop.sock_recv(listener, 64)
                return
        except TimeoutError:
            await backoff.pause()


async def is_unreachable(sender: socket.socket, address: IPAddress | str, port: int, listener: socket.socket) -> bool:
    """Whether the listener receives none of several datagrams."""
    loop = asyncio.get_running_loop()
    receiving = asyncio.ensure_future(loop.sock_recv(listener, 64))
    for _ in range(3):
        await loop.sock_sendto(sender, b"?", (str(address), port))
        await wait_event(asyncio.Event(), within=SILENCE_S)
    receiving.cancel()
    await asyncio.wait([receiving])
    return receiving.cancelled()


@ON_ALL
async def test_a_pod_that_reuses_a_service_vip_gets_no_established_flow(lab: NetLab) -> None:
    """CVE-2021-25736, S7: the flow to the former VIP is a new flow for the pod, and its ingress policy denies it."""
    await start(lab)
    one = await lab.host("one")
    client, provider = await one.pod("client", network="net"), await one.pod("provider", network="net")
    service = {"tenantName": "default", "serviceName": "shop", "networkName": "net", "ipAddress": VIP}
    selected = {"selectors": ["app=web"], "ports": [f"{PORT}:{OTHER_PORT}:UDP"]}
    (await lab.rest.put("serviceLBs", **service, **selected)).accepted()
    start_of = {"Event": "start", "Tenant": "default", "EndpointID": provider.name, "Labels": {"app": "web"}}
    (await lab.rest.post("/plugin/updateEndpoint", start_of)).accepted()
    with client.place().open_client(UDP) as sender:
        with provider.place().listening(OTHER_PORT, UDP) as listener:
            await send_until_received(sender, VIP, PORT, listener)
        (await lab.rest.delete("serviceLBs", "default:shop")).accepted()
        reuser = await pod_with_address(one, VIP)
        with reuser.place().listening(PORT, UDP) as listener:
            assert await is_unreachable(sender, VIP, PORT, listener)


@ON_ALL
async def test_a_pod_that_reuses_an_address_of_another_node_gets_no_reply_traffic(lab: NetLab) -> None:
    """A reply to the previous owner is a new flow for the new owner, and subject to its ingress policy."""
    await start(lab)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    server_pod, deleted_pod = (
        await one.pod("server", network="net"),
        await two.pod("deleted", network="net", group="closed"),
    )
    address = deleted_pod.address()
    with server_pod.place().listening(PORT, UDP) as server:
        with deleted_pod.place().listening(OTHER_PORT, UDP) as client:
            await send_until_received(client, server_pod.address(), PORT, server)
            await send_until_received(server, address, OTHER_PORT, client)
        await deleted_pod.remove()
        reuser = await pod_with_address(one, address)
        with reuser.place().listening(OTHER_PORT, UDP) as listener:
            assert await is_unreachable(server, address, OTHER_PORT, listener)
