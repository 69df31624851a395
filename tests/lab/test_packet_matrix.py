"""Probes of `weft verify`: a lost RST delays the next round but never blocks it forever."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest
from tests.support import inventory

from weft.kernel.netns import Namespace
from weft.lab.traffic import TCP, NetnsAddress
from weft.lab.verify.packet_matrix import Listeners, Probe, send_probes

HERE = Path("/proc/self/ns/net")
DROPS_ONE_RST = "tcp flags & rst == rst quota until 100 bytes counter drop"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_lost_rst_is_triggered_again(isolated: None, address: str) -> None:
    inventory.run(HERE, "nft add table inet loss")
    inventory.run(HERE, "nft add chain inet loss out { type filter hook output priority 0 ; }")
    inventory.run(HERE, f"nft add rule inet loss out {DROPS_ONE_RST}")
    with Namespace.current() as here, Listeners() as listeners:
        local = NetnsAddress(here, ip_address(address))
        probes = [Probe(local, local, TCP, port) for port in (80, 81)]
        assert send_probes(probes, listeners, count_denied=lambda: 0) == (frozenset(probes), 0)
    (_, _, rule) = inventory.run_json(HERE, "nft", "-j", "list", "table", "inet", "loss")["nftables"][1:]
    (dropped,) = (each["counter"] for each in rule["rule"]["expr"] if "counter" in each)
    assert dropped["packets"] > 0
