"""The cluster DNS service: every port leads to the tenant's gateways of the same family."""

from __future__ import annotations

from weft.domain.addresses import parse_address
from weft.domain.loadbalancer.cluster_dns import cluster_dns_pools
from weft.domain.loadbalancer.kube_objects import ServiceObject, ServicePort, ServiceSpec
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Target


def test_frontends_have_the_gateways_of_their_family() -> None:
    ports = (ServicePort(name="udp", protocol="UDP", port=53), ServicePort(name="tcp", port=53))
    service = ServiceObject(spec=ServiceSpec(cluster_ips=("10.96.0.10", "fd00::10"), ports=ports))
    v4, v6, *gateways = (
        parse_address(each, field="x") for each in ("10.96.0.10", "fd00::10", "10.1.0.254", "10.2.0.254")
    )
    pools = cluster_dns_pools(service, gateways)
    assert {frontend: [target.address for target in pool.targets] for frontend, pool in pools.items()} == {
        FrontendKey(v4, 17, 53): gateways,
        FrontendKey(v4, 6, 53): gateways,
        FrontendKey(v6, 17, 53): [],
        FrontendKey(v6, 6, 53): [],
    }
    assert pools[FrontendKey(v4, 17, 53)].targets[0] == Target(gateways[0], 53)
