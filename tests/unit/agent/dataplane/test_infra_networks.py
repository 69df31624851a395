"""The host in infra networks: its interface names and its endpoint id."""

from __future__ import annotations

import pytest

from weft.agent.dataplane.infra_networks import host_endpoint, interface_name
from weft.domain import model
from weft.domain.ids import EndpointId, NetworkName, NodeName, TenantName


@pytest.mark.parametrize("name", ["contivh1", "x" * 15])
def test_an_interface_is_named_after_its_network(name: str) -> None:
    """contiv 6.4."""
    assert interface_name(name) == name


def test_a_long_name_is_cut_and_stays_unique() -> None:
    """W36."""
    one, other = "a-network-with-a-long-name-1", "a-network-with-a-long-name-2"
    assert interface_name(one) == interface_name(one)
    assert interface_name(one) != interface_name(other)
    assert len(interface_name(one)) == 15


def test_the_hosts_endpoint_id_is_the_node_name() -> None:
    """W36: not the machine's host name."""
    network = model.Network(tenant=TenantName("blue"), name=NetworkName("mgmt"), encap="vxlan", subnet="10.0.0.0/24")
    assert host_endpoint(network, NodeName("node-1")).endpoint_id == EndpointId("node-1")
