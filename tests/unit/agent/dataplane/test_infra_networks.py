"""The host in infra networks: what its interfaces are called, and how it is known there."""

from __future__ import annotations

import pytest

from weft.agent.dataplane.infra_networks import host_endpoint, interface_name
from weft.domain import model
from weft.domain.ids import EndpointId, NetworkName, NodeName, TenantName


@pytest.mark.parametrize("name", ["contivh1", "x" * 15])
def test_an_interface_has_the_networks_name(name: str) -> None:
    """contiv 6.4."""
    assert interface_name(name) == name


def test_a_long_name_is_shortened_always_alike_and_never_to_anothers() -> None:
    """W36."""
    one, other = "a-network-with-a-long-name-1", "a-network-with-a-long-name-2"
    assert interface_name(one) == interface_name(one)
    assert interface_name(one) != interface_name(other)
    assert len(interface_name(one)) == 15


def test_the_host_is_known_by_its_nodes_name() -> None:
    """W36: not by what the machine is called."""
    network = model.Network(tenant=TenantName("blue"), name=NetworkName("mgmt"), encap="vxlan", subnet="10.0.0.0/24")
    assert host_endpoint(network, NodeName("node-1")).endpoint_id == EndpointId("node-1")
