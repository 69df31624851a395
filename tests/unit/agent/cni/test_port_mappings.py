"""Ports of the host are given to one workload each; rates come in the datapath's own units."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from weft.agent.cni.port_mappings import published_ports, refuse_taken_ports, wished_rates
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.cni.portmap_bandwidth import Bandwidth, PortMapping
from weft.domain import model
from weft.domain.addresses import parse_address
from weft.domain.desired.state import RateLimits, port_of
from weft.domain.errors import Conflict
from weft.domain.host_access.view import PublishedPort
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, TenantName
from weft.domain.policy.model.protocols import TCP, UDP
from weft.ports.datapath import EndpointConfig

OTHER = EndpointKey(TenantName("blue"), NetworkName("net"), EndpointId("other"))
WEB = PublishedPort(TCP, 80, 8080)


def journal_with(*ports: PublishedPort, stage: Stage = Stage.ATTACHED) -> AttachmentStore:
    journal = AttachmentStore()
    endpoint = model.Endpoint(tenant=TenantName("blue"), network=NetworkName("net"), endpoint_id=EndpointId("e"))
    wiring = EndpointConfig(port=port_of(endpoint), netns="/n", interface="eth0", addresses=(), mtu=1450, ports=ports)
    journal.put(Attachment(endpoint=endpoint, published=True, stage=stage, wiring=wiring))
    return journal


def test_wishes_become_ports() -> None:
    asked = PortMapping(protocol="udp", host_port=53, container_port=5353, host_ip=ip_address("192.0.2.1"))
    own = parse_address("192.0.2.1", field="test")
    assert published_ports([asked]) == (PublishedPort(UDP, 53, 5353, own),)


def test_bursts_come_in_bits() -> None:
    asked = Bandwidth(ingress_rate=8, ingress_burst=80, egress_rate=16, egress_burst=160)
    assert wished_rates(asked) == RateLimits(out=16, out_burst=20, into=8, into_burst=10)


def test_a_port_that_is_taken_is_refused_with_its_holder() -> None:
    with pytest.raises(Conflict, match="tcp/80 of the host is taken by blue"):
        refuse_taken_ports((WEB,), journal_with(WEB), but=OTHER)


def test_a_port_is_not_given_twice_in_one_wish() -> None:
    with pytest.raises(Conflict, match="asked for twice"):
        refuse_taken_ports((WEB, WEB), AttachmentStore(), but=OTHER)


@pytest.mark.parametrize(
    "journal", [journal_with(), journal_with(PublishedPort(UDP, 80, 1)), journal_with(WEB, stage=Stage.LEAVING)]
)
def test_a_port_that_is_free_is_given(journal: AttachmentStore) -> None:
    refuse_taken_ports((WEB,), journal, but=OTHER)
