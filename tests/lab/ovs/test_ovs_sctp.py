"""Rules on SCTP ports, which the userspace conntrack does not report."""

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

CLIENT_PORT, ALLOWED, DENIED = 40000, 8, 7
Ports = tuple[int, int]
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


def open_raw(pod: Pod, family: int) -> socket.socket:
    """A raw SCTP socket in the pod, independent of SCTP support in its kernel."""
    opened = pod.namespace.open_socket(FAMILIES[family], socket.SOCK_RAW, SCTP)
    opened.setblocking(False)
    opened.bind((str(pod.address(family)), 0))
    return opened


async def receive_ports(receiver: socket.socket) -> Ports | None:
    """The ports of the next packet; None if none arrives for a while."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(SILENCE_S):
            data = await loop.sock_recv(receiver, 1500)
    except TimeoutError:
        return None
    source, target = struct.unpack_from(">HH", data, (data[0] & 15) * 4 if receiver.family == socket.AF_INET else 0)
    return source, target


async def until_filtered(
    sender: socket.socket, receiver: socket.socket, address: IPAddress, *, allowed: Ports, denied: Ports
) -> None:
    """Send packets until one between the allowed ports arrives; none between the denied ports may."""
    loop = asyncio.get_running_loop()
    backoff = Backoff(cap=0.2, within=DEADLINE)
    while True:
        for ports in (denied, allowed):
            await loop.sock_sendto(sender, sctp_packet(*ports), (str(address), 0))
        received = [ports async for ports in receive_all(receiver)]
        assert denied not in received
        if allowed in received:
            return
        await backoff.pause()


async def receive_all(receiver: socket.socket) -> AsyncIterator[Ports]:
    while (ports := await receive_ports(receiver)) is not None:
        yield ports


async def test_sctp_ports_are_matched_in_both_directions(lab: NetLab) -> None:
    """A rule on a port applies to requests to it and to replies from it."""
    await lab.network("net", subnet="10.1.0.0/16", gateway="10.1.255.254", ipv6Subnet="2001:db8:1::/64")
    policy = {"tenantName": "default", "policyName": "guard"}
    (await lab.rest.put("policys", **policy)).accepted()
    rule = {"ruleId": "1", "priority": 1, "direction": "in", "action": "deny", "protocol": "sctp", "port": DENIED}
    (await lab.rest.put("rules", **policy, **rule)).accepted()
    await lab.group("guarded", network="net", policies=["guard"])
    one = await lab.host("one")
    client, server = await one.pod("client", network="net"), await one.pod("server", network="net", group="guarded")
    for family in FAMILIES:
        with open_raw(client, family) as client_socket, open_raw(server, family) as server_socket:
            server_address, client_address = server.address(family), client.address(family)
            await until_filtered(
                client_socket,
                server_socket,
                server_address,
                allowed=(CLIENT_PORT, ALLOWED),
                denied=(CLIENT_PORT, DENIED),
            )
            await until_filtered(
                server_socket,
                client_socket,
                client_address,
                allowed=(ALLOWED, CLIENT_PORT),
                denied=(DENIED, CLIENT_PORT),
            )
