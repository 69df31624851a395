"""What ADD tells the runtime beside how the workload was wired."""

from __future__ import annotations

import msgspec

from weft.agent.cni.attachments import result_of
from weft.cni.result import Dns, Interface, Result
from weft.domain import model
from weft.domain.addresses import parse_address
from weft.domain.desired.state import port_of
from weft.domain.ids import EndpointId, NetworkName, TenantName
from weft.ports.datapath import EndpointConfig, InterfaceAddress

ENDPOINT = model.Endpoint(
    tenant=TenantName("default"),
    network=NetworkName("default-net"),
    endpoint_id=EndpointId("c1"),
    mac_address="02:02:0a:01:01:09",
)
WIRING = EndpointConfig(port=port_of(ENDPOINT), netns="/run/netns/c1", interface="eth0", addresses=(), mtu=1450)
BEFORE = Result(interfaces=(Interface(name="lo"),), dns=Dns(nameservers=("10.0.0.2",)))


def test_names_are_resolved_as_asked_for_or_as_the_plugins_before_us_said() -> None:
    """P-10: absent and empty differ."""
    asked = Dns(nameservers=("10.0.0.53",), search=("blue.example",))
    assert result_of(WIRING, None).dns == Dns()
    assert result_of(WIRING, None, dns=asked).dns == asked
    assert result_of(WIRING, BEFORE).dns == BEFORE.dns
    assert result_of(WIRING, BEFORE, dns=asked).dns == asked
    assert result_of(WIRING, BEFORE, dns=Dns()).dns == Dns()


def test_names_are_resolved_by_the_gateways_where_nobody_says_otherwise() -> None:
    def wired(address: str, gateway: str) -> InterfaceAddress:
        return InterfaceAddress(
            parse_address(address, field="a"), 24, parse_address(gateway, field="g") if gateway else None
        )

    dual = msgspec.structs.replace(WIRING, addresses=(wired("10.1.1.9", "10.1.1.1"), wired("fd00::9", "fd00::1")))
    half = msgspec.structs.replace(WIRING, addresses=(wired("10.1.1.9", ""), wired("fd00::9", "fd00::1")))
    assert result_of(dual, None, names=True).dns == Dns(nameservers=("10.1.1.1", "fd00::1"))
    assert result_of(half, None, names=True).dns == Dns(nameservers=("fd00::1",))
    assert result_of(dual, None).dns == result_of(WIRING, None, names=True).dns == Dns()
    assert result_of(dual, BEFORE, names=True).dns == BEFORE.dns
    assert result_of(dual, None, dns=Dns(), names=True).dns == Dns(), "P-10: asked for nothing"


def test_interfaces_of_plugins_before_us_come_first() -> None:
    """C-044."""
    assert [each.name for each in result_of(WIRING, BEFORE).interfaces] == ["lo", WIRING.port.interface, "eth0"]
