"""The cluster DNS service: pods query one address, and the netdns of their own tenant and node serves them.

A kubelet writes the same name server address into the pods of all tenants. In each tenant that address is load-balanced
to the tenant's gateways, where netdns listens. So queries of different tenants never mix.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.domain.addresses import Address
from weft.domain.loadbalancer.kube_objects import ServiceObject
from weft.domain.loadbalancer.kubernetes import cluster_addresses
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Pool, Target, pool_of
from weft.domain.policy.model.protocols import protocol_number

# netdns listens on the standard port of the gateways, whatever port the Service has.
DNS_PORT = 53


def cluster_dns_pools(service: ServiceObject, gateways: Iterable[Address]) -> dict[FrontendKey, Pool]:
    """Return frontends that lead every port of the service to gateways of the same family; may raise `Invalid`."""
    # A generator would be exhausted after the first frontend.
    all_gateways = tuple(gateways)
    return {
        FrontendKey(address, protocol_number(port.protocol), port.port): pool_of(
            Target(gateway, DNS_PORT) for gateway in all_gateways if gateway.family == address.family
        )
        for address in cluster_addresses(service)
        for port in service.spec.ports
    }
