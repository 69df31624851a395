"""Pieces of datagrams that never become whole: Open vSwitch lets go of them among the packets of anybody."""

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

_LET_GO = re.compile(r"frags expired: (\d+)")
_PIECES = 20


@pytest.mark.soak
async def test_what_waits_in_vain_comes_to_nobody(lab: NetLab) -> None:
    """Not to another tenant either, whose new connections the switch looks at when it has waited long enough."""
    one = await lab.host("one")
    pods: dict[str, list[Pod]] = {}
    for number, tenant in enumerate(("red", "blue")):
        await lab.tenant(tenant)
        await lab.network("net", tenant=tenant, subnet=f"10.{number}.0.0/24")
        pods[tenant] = [await one.pod(f"{tenant}-{each}", tenant=tenant, network="net") for each in range(2)]
    speaker, hearer = pods["blue"]
    for number in range(_PIECES):
        send_second_piece(*pods["red"], number=number)

    async def speaks() -> int:
        for _ in range(20):
            with speaker.place().open_caller(UDP) as mouth:  # a port of its own, so a connection of its own
                mouth.sendto(b"?", (str(hearer.address()), 5000))
        await asyncio.sleep(SILENCE_S)
        return let_go(one)

    with Tap(hearer.namespace) as tap:
        await eventually(speaks, lambda count: count >= _PIECES)
        assert {str(each.source) for each in tap.seen()} == {str(speaker.address())}


def let_go(host: Host) -> int:
    """How many pieces the switch has let go of so far."""
    assert host.switch is not None
    return sum(map(int, _LET_GO.findall(host.switch.command("dpctl/ipf-get-status"))))


def send_second_piece(source: Pod, target: Pod, *, number: int) -> None:
    header = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 60, number, 185, 64, 17, 0, source.address().packed, target.address().packed
    )
    with source.namespace.open_socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as mouth:
        mouth.sendto(header + bytes(40), (str(target.address()), 0))
