"""The service by which pods ask for names, where Weft answers: in each tenant its own netdns, on the node of who asks.

A kubelet writes one address of a name server into the pods of all tenants. So that address leads to the gateways of
whoever asks, where netdns is, and no two tenants meet there.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.domain.addresses import Address
from weft.domain.loadbalancer.kube_objects import DeclaredService
from weft.domain.loadbalancer.kubernetes import own_addresses
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Pool, Target, pool_of
from weft.domain.policy.model.protocols import protocol_number

DNS_PORT = 53


def pools_for_names(service: DeclaredService, gateways: Iterable[Address]) -> dict[FrontendKey, Pool]:
    """Every port of the service leads to a gateway of its family; `Invalid` when an address of it is none."""
    listed = tuple(gateways)
    return {
        FrontendKey(address, protocol_number(port.protocol), port.port): pool_of(
            Target(gateway, DNS_PORT) for gateway in listed if gateway.family == address.family
        )
        for address in own_addresses(service)
        for port in service.spec.ports
    }
