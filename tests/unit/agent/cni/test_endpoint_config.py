"""The planned configuration of an endpoint, its host ports and rates, and the CNI result."""

from __future__ import annotations

from ipaddress import ip_address

import msgspec
import pytest

from weft.agent.cni.endpoint_config import check_host_ports_free, host_ports, plan_result, rate_limits
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.cni.portmap_bandwidth import Bandwidth, PortMapping
from weft.cni.result import Dns, Interface, Result
from weft.domain import model
from weft.domain.addresses import parse_address
from weft.domain.desired.state import RateLimits, port_of
from weft.domain.errors import Conflict
from weft.domain.host_access.view import PublishedPort
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, TenantName
from weft.domain.policy.model.protocols import TCP, UDP
from weft.ports.datapath import EndpointConfig, InterfaceAddress

OTHER = EndpointKey(TenantName("blue"), NetworkName("net"), EndpointId("other"))
WEB = PublishedPort(TCP, 80, 8080)
ENDPOINT = model.Endpoint(
    tenant=TenantName("default"),
    network=NetworkName("default-net"),
    endpoint_id=EndpointId("c1"),
    mac_address="02:02:0a:01:01:09",
)
CONFIG = EndpointConfig(port=port_of(ENDPOINT), netns="/run/netns/c1", interface="eth0", addresses=(), mtu=1450)
PREVIOUS = Result(interfaces=(Interface(name="lo"),), dns=Dns(nameservers=("10.0.0.2",)))


def store_with(*ports: PublishedPort, stage: Stage = Stage.ATTACHED) -> AttachmentStore:
    attachment_store = AttachmentStore()
    endpoint = model.Endpoint(tenant=TenantName("blue"), network=NetworkName("net"), endpoint_id=EndpointId("e"))
    config = EndpointConfig(port=port_of(endpoint), netns="/n", interface="eth0", addresses=(), mtu=1450, ports=ports)
    attachment_store.put(Attachment(endpoint=endpoint, published=True, stage=stage, config=config))
    return attachment_store


def test_port_mappings_become_host_ports() -> None:
    mapping = PortMapping(protocol="udp", host_port=53, container_port=5353, host_ip=ip_address("192.0.2.1"))
    host_ip = parse_address("192.0.2.1", field="test")
    assert host_ports([mapping]) == (PublishedPort(UDP, 53, 5353, host_ip),)


def test_bursts_are_converted_from_bits_to_bytes() -> None:
    bandwidth = Bandwidth(ingress_rate=8, ingress_burst=80, egress_rate=16, egress_burst=160)
    assert rate_limits(bandwidth) == RateLimits(egress=16, egress_burst=20, ingress=8, ingress_burst=10)


def test_a_taken_host_port_is_rejected_with_its_holder() -> None:
    with pytest.raises(Conflict, match="tcp/80 of the host is taken by blue"):
        check_host_ports_free((WEB,), store_with(WEB), endpoint=OTHER)


def test_M1_a_reserved_host_port_is_refused_at_every_address() -> None:
    for address in (None, parse_address("127.0.0.1", field="test"), parse_address("2001:db8::1", field="test")):
        port = PublishedPort(TCP, 9090, 80, address)
        with pytest.raises(Conflict, match=r"tcp/9090 of the host is reserved .*--reserved-host-ports") as refusal:
            check_host_ports_free((WEB, port), (), endpoint=OTHER, reserved={(TCP, 9090)})
        assert refusal.value.field == "portMappings"
    check_host_ports_free((PublishedPort(UDP, 9090, 80),), (), endpoint=OTHER, reserved={(TCP, 9090)})


def test_a_host_port_cannot_be_requested_twice() -> None:
    with pytest.raises(Conflict, match="requested twice"):
        check_host_ports_free((WEB, WEB), AttachmentStore(), endpoint=OTHER)


@pytest.mark.parametrize(
    "attachment_store", [store_with(), store_with(PublishedPort(UDP, 80, 1)), store_with(WEB, stage=Stage.DELETING)]
)
def test_a_free_host_port_is_accepted(attachment_store: AttachmentStore) -> None:
    check_host_ports_free((WEB,), attachment_store, endpoint=OTHER)


def test_dns_is_that_of_the_request_or_of_the_previous_result() -> None:
    """P-10: absent and empty differ."""
    requested = Dns(nameservers=("10.0.0.53",), search=("blue.example",))
    assert plan_result(CONFIG, None).dns == Dns()
    assert plan_result(CONFIG, None, dns=requested).dns == requested
    assert plan_result(CONFIG, PREVIOUS).dns == PREVIOUS.dns
    assert plan_result(CONFIG, PREVIOUS, dns=requested).dns == requested
    assert plan_result(CONFIG, PREVIOUS, dns=Dns()).dns == Dns()


def test_gateways_are_the_default_name_servers() -> None:
    def address(text: str, gateway: str) -> InterfaceAddress:
        return InterfaceAddress(
            parse_address(text, field="a"), 24, parse_address(gateway, field="g") if gateway else None
        )

    both = (address("10.1.1.9", "10.1.1.1"), address("fd00::9", "fd00::1"))
    one = (address("10.1.1.9", ""), address("fd00::9", "fd00::1"))
    dual = msgspec.structs.replace(CONFIG, addresses=both)
    half = msgspec.structs.replace(CONFIG, addresses=one)
    assert plan_result(dual, None, gateways_serve_dns=True).dns == Dns(nameservers=("10.1.1.1", "fd00::1"))
    assert plan_result(half, None, gateways_serve_dns=True).dns == Dns(nameservers=("fd00::1",))
    assert plan_result(dual, None).dns == plan_result(CONFIG, None, gateways_serve_dns=True).dns == Dns()
    assert plan_result(dual, PREVIOUS, gateways_serve_dns=True).dns == PREVIOUS.dns
    assert plan_result(dual, None, dns=Dns(), gateways_serve_dns=True).dns == Dns(), "P-10: requested to be empty"


def test_interfaces_of_earlier_plugins_come_first() -> None:
    """C-044."""
    names = [interface.name for interface in plan_result(CONFIG, PREVIOUS).interfaces]
    assert names == ["lo", CONFIG.port.interface, "eth0"]
