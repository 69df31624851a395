"""Where names are asked for: every port leads to the gateways of the asking tenant, by family."""

from __future__ import annotations

from weft.domain.addresses import parse_address
from weft.domain.loadbalancer.cluster_dns import pools_for_names
from weft.domain.loadbalancer.kube_objects import DeclaredService, ServicePort, ServiceSpec
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Target


def test_fronts_of_both_families_lead_to_gateways_of_their_own() -> None:
    ports = (ServicePort(name="udp", protocol="UDP", port=53), ServicePort(name="tcp", port=53))
    service = DeclaredService(spec=ServiceSpec(cluster_ips=("10.96.0.10", "fd00::10"), ports=ports))
    v4, v6, *gateways = (
        parse_address(each, field="x") for each in ("10.96.0.10", "fd00::10", "10.1.0.254", "10.2.0.254")
    )
    pools = pools_for_names(service, gateways)
    assert {front: [target.address for target in pool.targets] for front, pool in pools.items()} == {
        FrontendKey(v4, 17, 53): gateways,
        FrontendKey(v4, 6, 53): gateways,
        FrontendKey(v6, 17, 53): [],
        FrontendKey(v6, 6, 53): [],
    }
    assert pools[FrontendKey(v4, 17, 53)].targets[0] == Target(gateways[0], 53)
