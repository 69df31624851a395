"""Incomplete fragmented datagrams: the userspace conntrack releases timed-out fragments with packets of other flows."""

from __future__ import annotations

import asyncio
import re
import socket
import struct

import pytest
from tests.support.connectivity import SILENCE_S
from tests.support.flood import Tap

from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.traffic import UDP
from weft.lab.waiting import eventually

_EXPIRED = re.compile(r"frags expired: (\d+)")
_FRAGMENTS = 20


@pytest.mark.soak
async def test_timed_out_fragments_are_dropped(lab: NetLab) -> None:
    """They do not reach another tenant either, whose new connections trigger the release."""
    one = await lab.host("one")
    pods: dict[str, list[Pod]] = {}
    for number, tenant in enumerate(("red", "blue")):
        await lab.tenant(tenant)
        await lab.network("net", tenant=tenant, subnet=f"10.{number}.0.0/24")
        pods[tenant] = [await one.pod(f"{tenant}-{each}", tenant=tenant, network="net") for each in range(2)]
    sender_pod, receiver_pod = pods["blue"]
    for number in range(_FRAGMENTS):
        send_second_fragment(*pods["red"], number=number)

    async def send_datagrams() -> int:
        for _ in range(20):
            with sender_pod.place().open_client(UDP) as sender:  # a new port for each, so a new connection
                sender.sendto(b"?", (str(receiver_pod.address()), 5000))
        await asyncio.sleep(SILENCE_S)
        return expired_fragments(one)

    with Tap(receiver_pod.namespace) as tap:
        await eventually(send_datagrams, lambda count: count >= _FRAGMENTS)
        assert {str(each.source) for each in tap.packets()} == {str(sender_pod.address())}


def expired_fragments(host: Host) -> int:
    """How many fragments have timed out so far."""
    assert host.switch is not None
    return sum(map(int, _EXPIRED.findall(host.switch.command("dpctl/ipf-get-status"))))


def send_second_fragment(source: Pod, target: Pod, *, number: int) -> None:
    header = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 60, number, 185, 64, 17, 0, source.address().packed, target.address().packed
    )
    with source.namespace.open_socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sender:
        sender.sendto(header + bytes(40), (str(target.address()), 0))
