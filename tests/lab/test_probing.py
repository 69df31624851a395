"""The judge's own tool: a packet that is lost holds it up, and never for ever."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest
from tests.support import inventory

from weft.kernel.netns import Namespace
from weft.lab.traffic import TCP, Place
from weft.lab.verify.packet_matrix import Listeners, Question, ask

HERE = Path("/proc/self/ns/net")
LOSES_A_RESET = "tcp flags & rst == rst quota until 100 bytes counter drop"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_reset_that_is_lost_is_asked_for_again(apart: None, address: str) -> None:
    inventory.run(HERE, "nft add table inet loss")
    inventory.run(HERE, "nft add chain inet loss out { type filter hook output priority 0 ; }")
    inventory.run(HERE, f"nft add rule inet loss out {LOSES_A_RESET}")
    with Namespace.current() as here, Listeners() as ears:
        place = Place(here, ip_address(address))
        questions = [Question(place, place, TCP, port) for port in (80, 81)]
        assert ask(questions, ears, count_refused=lambda: 0) == (frozenset(questions), 0)
    (_, _, rule) = inventory.ask(HERE, "nft", "-j", "list", "table", "inet", "loss")["nftables"][1:]
    (lost,) = (each["counter"] for each in rule["rule"]["expr"] if "counter" in each)
    assert lost["packets"] > 0
