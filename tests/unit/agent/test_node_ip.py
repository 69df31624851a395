"""Detection of the node IP (contiv 1.5)."""

from __future__ import annotations

import pytest

from weft.agent.node_ip import choose_address, default_address
from weft.domain.addresses import Address, parse_address


def address(text: str) -> Address:
    return parse_address(text, field="address")


HOST = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "192.0.2.2", "eth1": "198.51.100.2"}


@pytest.mark.parametrize(
    ("interfaces", "resolved", "chosen"),
    [
        (HOST, ["198.51.100.2"], "198.51.100.2"),
        (HOST, ["127.0.1.1", "198.51.100.2"], "198.51.100.2"),
        (HOST, ["127.0.0.1"], "192.0.2.2"),
        (HOST, ["203.0.113.9"], "192.0.2.2"),
        (HOST, [], "192.0.2.2"),
        (HOST, ["172.17.0.1"], "172.17.0.1"),
        ({"lo": "127.0.0.1", "veth1a": "10.0.0.1", "vport3": "10.0.0.2", "docker1": "10.0.0.3"}, [], "127.0.0.1"),
        ({}, ["192.0.2.2"], "127.0.0.1"),
    ],
)  # fmt: skip
def test_the_host_name_comes_first_then_the_first_physical_interface(
    interfaces: dict[str, str], resolved: list[str], chosen: str
) -> None:
    local = {name: address(text) for name, text in interfaces.items()}
    assert choose_address(local, tuple(map(address, resolved))) == address(chosen)


def test_this_machine_has_a_node_ip() -> None:
    assert default_address().family == 4
