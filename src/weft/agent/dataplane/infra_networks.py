"""Infra networks (contiv 6.4): on each the host itself has an address, on an interface of the network's name."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from weft.domain import model
from weft.domain.ids import EndpointId, NodeName
from weft.ports.datapath import EndpointConfig

# The host's own namespace, in which the agent is.
HOST_NETNS: Final = "/proc/thread-self/ns/net"

_LONGEST_NAME = 15
_DIGEST = 6


def interface_name(network: str) -> str:
    """The network's name as far as an interface can bear it; a longer one ends in a digest of the whole (W36)."""
    if len(network) <= _LONGEST_NAME:
        return network
    digest = hashlib.sha256(network.encode()).hexdigest()[:_DIGEST]
    return f"{network[: _LONGEST_NAME - _DIGEST - 1]}-{digest}"


def host_endpoint(network: model.Network, node: NodeName) -> model.Endpoint:
    """The host as an endpoint of a network: its id is the node's name, whatever the machine is called (W36)."""
    return model.Endpoint(
        tenant=network.tenant,
        network=network.name,
        endpoint_id=EndpointId(node),
        host=node,
        interface=interface_name(network.name),
        container_id=node,
    )


def host_wiring(wiring: EndpointConfig, network: model.Network) -> EndpointConfig:
    """The wiring in the host's namespace: nothing but the network's own subnets goes that way."""
    full_name = network.name if wiring.interface != network.name else ""
    return msgspec.structs.replace(wiring, default_route=False, full_name=full_name)
