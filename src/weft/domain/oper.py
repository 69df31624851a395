"""Operational state of objects, computed from the cluster, as `inspect` shows it (contiv 2.2).

Member names are Contiv's; zero values are omitted, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.ids import GroupKey, GroupName
from weft.domain.ipam import ipam
from weft.domain.kinds import Kind
from weft.domain.lifecycle.sync_status import node_status
from weft.domain.loadbalancer.external_ips import external_ip_policy
from weft.domain.loadbalancer.kube_objects import KubeService
from weft.domain.loadbalancer.service_pools import service_faults, valid_cluster_ips
from weft.domain.services import providers

Oper = dict[str, Any]


def oper_of(cluster: Cluster, kind: Kind[Any], value: model.Value) -> Oper:
    """The operational members of one object."""
    view = _VIEWS.get(kind.name)
    return _without_zeros(view(cluster, value)) if view else {}


# As Contiv: clients take an absent member for zero.
def _without_zeros(members: Oper) -> Oper:
    return {name: member for name, member in members.items() if member not in (0, "", [], {}, None)}


def endpoint_oper(cluster: Cluster, endpoint: model.Endpoint) -> Oper:
    """An endpoint as `inspect` shows it (contiv 2.2, endpoint)."""
    group = cluster.group(GroupKey(endpoint.tenant, GroupName(endpoint.group))) if endpoint.group else None
    return _without_zeros(
        {
            "endpointID": endpoint.endpoint_id,
            "tenantName": endpoint.tenant,
            # Contiv joins names with a dot here, and with a colon in keys.
            "network": f"{endpoint.network}.{endpoint.tenant}",
            "serviceName": endpoint.group,
            "endpointGroupId": group.group_id if group else 0,
            "endpointGroupKey": f"{endpoint.group}:{endpoint.tenant}" if endpoint.group else "",
            "ipAddress": [text for text in (endpoint.ip_address, endpoint.ipv6_address) if text],
            "macAddress": endpoint.mac_address,
            "homingHost": endpoint.host,
            "intfName": endpoint.interface,
            "vtepIP": endpoint.vtep_ip,
            "labels": endpoint.labels,
            "containerID": endpoint.container_id,
            "containerName": endpoint.container_name,
        }
    )


def _endpoints(cluster: Cluster, endpoints: Iterable[model.Endpoint]) -> list[Oper]:
    return [endpoint_oper(cluster, endpoint) for endpoint in sorted(endpoints, key=lambda one: one.key)]


def _tenant(cluster: Cluster, tenant: model.Tenant) -> Oper:
    networks = list(cluster.networks(tenant.name))
    groups = list(cluster.all(kinds.GROUP, tenant.name))
    policies = list(cluster.all(kinds.POLICY, tenant.name))
    services = list(cluster.all(kinds.SERVICE, tenant.name))
    endpoints = [endpoint for network in networks for endpoint in cluster.endpoints(network.key)]
    return {
        "totalNetworks": len(networks),
        "totalEPGs": len(groups),
        "totalPolicies": len(policies),
        "totalServicelbs": len(services),
        "totalNetprofiles": sum(1 for _ in cluster.all(kinds.PROFILE, tenant.name)),
        "totalEndpoints": len(endpoints),
        "networks": [{"networkName": one.name, **oper_of(cluster, kinds.NETWORK, one)} for one in networks],
        "endpointGroups": [{"groupName": one.name, **oper_of(cluster, kinds.GROUP, one)} for one in groups],
        "policies": [{"policyName": one.name, **oper_of(cluster, kinds.POLICY, one)} for one in policies],
        "servicelbs": [{"serviceName": one.name, **oper_of(cluster, kinds.SERVICE, one)} for one in services],
        "endpoints": _endpoints(cluster, endpoints),
    }


def _network(cluster: Cluster, network: model.Network) -> Oper:
    endpoints = list(cluster.endpoints(network.key))
    taken = ipam.used_addresses(cluster, network, family=4)
    spans = ipam.spans_for(cluster, network, None, 4)
    subnet = ipam.subnet_of(network, 4)
    # IPv4 is mandatory for a network.
    assert subnet is not None
    return {
        "pktTag": network.tags.vlan if network.tags else 0,
        "externalPktTag": network.tags.vni if network.tags else 0,
        "networkTag": network.cfgd_tag or f"{network.name}.{network.tenant}",
        "numEndpoints": len(endpoints),
        "allocatedAddressesCount": len(taken),
        "allocatedIPAddresses": _runs(taken.runs(subnet.usable.first, subnet.usable.last, taken=True)),
        "availableIPAddresses": _runs(run for first, last in spans for run in taken.runs(first, last, taken=False)),
        "endpoints": _endpoints(cluster, endpoints),
    }


def _group(cluster: Cluster, group: model.Group) -> Oper:
    members = list(cluster.group_members(group))
    stored = cluster.get(kinds.NETWORK, group.tenant, group.network)
    network = stored.value if stored else None
    view: Oper = {
        "endpointGroupId": group.group_id,
        "groupTag": group.cfgd_tag or f"{group.name}.{group.tenant}",
        "numEndpoints": len(members),
        "endpoints": _endpoints(cluster, members),
    }
    if network and network.tags:
        view |= {"pktTag": group.pkt_tag or network.tags.vlan, "externalPktTag": network.tags.vni}
    if network and group.ip_pool:
        taken = cluster.address_pool(network.key, 4).taken
        spans = ipam.spans_for(cluster, network, group, 4)
        view["allocatedIPAddresses"] = _runs(run for span in spans for run in taken.runs(*span, taken=True))
        view["availableIPAddresses"] = _runs(run for span in spans for run in taken.runs(*span, taken=False))
    return view


def _policy(cluster: Cluster, policy: model.Policy) -> Oper:
    members = [
        endpoint
        for group in cluster.all(kinds.GROUP, policy.tenant)
        if policy.name in group.policies
        for endpoint in cluster.group_members(group)
    ]
    return {"numEndpoints": len(members), "endpoints": _endpoints(cluster, members)}


def _service(cluster: Cluster, service: model.Service) -> Oper:
    backends = list(providers(cluster, service))
    return {
        "serviceVip": service.vip,
        "ipv6ServiceVip": service.ipv6_vip,
        "numProviders": len(backends),
        "providers": _endpoints(cluster, backends),
    }


def _kube_service(cluster: Cluster, document: KubeService) -> Oper:
    """What of it has no effect: what cannot be read, and external addresses that are not the tenant's."""
    own = {address for each in cluster.all(kinds.KUBE_SERVICE) for address in valid_cluster_ips(each)}
    return {"faults": list(service_faults(document, external_ip_policy(cluster, document.tenant), own))}


def _global(cluster: Cluster, settings: model.Global) -> Oper:
    vlans, vnis = cluster.number_pool("vlan").taken, cluster.number_pool("vni").taken
    # validation guarantees the form first-last.
    first_vni, last_vni = (int(text) for text in settings.vxlans.split("-"))
    defaults = [tenant.default_network for tenant in cluster.all(kinds.TENANT) if tenant.default_network]
    return {
        "numNetworks": len(vlans) + len(vnis),
        "defaultNetwork": defaults[0] if defaults else "",
        # 4095 and 1 << 24 are just above the largest VLAN tag and VNI.
        "vlansInUse": _numbers(vlans.runs(1, 4095, taken=True)),
        "vxlansInUse": _numbers(vnis.runs(1, 1 << 24, taken=True)),
        "freeVXLANsStart": vnis.next_free(first_vni, last_vni) or 0,
    }


def _node(cluster: Cluster, node: model.Node) -> Oper:
    return node_status(cluster, node.name)


def _runs(runs: Iterable[tuple[int, int]]) -> str:
    return ipam.describe(list(runs), 4)


def _numbers(runs: Iterable[tuple[int, int]]) -> str:
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# By name: kinds without operational state are missing here.
_VIEWS: dict[str, Callable[[Cluster, Any], Oper]] = {
    kinds.TENANT.name: _tenant,
    kinds.NETWORK.name: _network,
    kinds.GROUP.name: _group,
    kinds.POLICY.name: _policy,
    kinds.SERVICE.name: _service,
    kinds.KUBE_SERVICE.name: _kube_service,
    kinds.GLOBAL.name: _global,
    kinds.ENDPOINT.name: endpoint_oper,
    kinds.NODE.name: _node,
}
