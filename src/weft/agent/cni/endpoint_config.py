"""Plans how an endpoint is configured, and the CNI result that describes it. Pure functions; nothing is changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network

from weft.agent.store.attachment_store import HAS_PORT, Attachment
from weft.cni import request as cni
from weft.cni import result
from weft.cni.portmap_bandwidth import Bandwidth, PortMapping
from weft.domain import model
from weft.domain.addresses import parse_address
from weft.domain.desired.state import NO_LIMITS, RateLimits, port_of
from weft.domain.errors import Conflict
from weft.domain.host_access.view import PublishedPort
from weft.domain.ids import EndpointKey
from weft.domain.ipam import ipam
from weft.domain.policy.model.protocols import protocol_name, protocol_number
from weft.ports.datapath import EndpointConfig, InterfaceAddress

_ADDRESS: Mapping[int, Callable[[int], result.IPAddress]] = {4: IPv4Address, 6: IPv6Address}
_INTERFACE: Mapping[int, Callable[[tuple[int, int]], result.IPInterface]] = {4: IPv4Interface, 6: IPv6Interface}
_DEFAULT_ROUTE: Mapping[int, result.IPNetwork] = {4: IPv4Network("0.0.0.0/0"), 6: IPv6Network("::/0")}


def plan_config(
    endpoint: model.Endpoint,
    network: model.Network,
    *,
    netns: str,
    mtu: int,
    segment: int = 0,
    primary: Attachment | None = None,
    ports: tuple[PublishedPort, ...] = (),
    rates: RateLimits = NO_LIMITS,
) -> EndpointConfig:
    """The configuration of an endpoint: each address with the prefix length and gateway of its subnet.

    `primary` is the container's first interface, if this is another one: that one keeps the default route.
    """
    addresses = []
    # IPAM allocates only from the network's subnets, so each address has one.
    for address in endpoint.addresses:
        subnet = ipam.subnet_of(network, address.family)
        assert subnet is not None
        addresses.append(InterfaceAddress(address, subnet.length, ipam.gateway_of(network, address.family)))
    return EndpointConfig(
        port=port_of(endpoint, segment=segment),
        netns=netns,
        interface=endpoint.interface,
        addresses=tuple(addresses),
        mtu=mtu,
        default_route=primary is None,
        shares_subnets=primary is not None and primary.endpoint.network_key == endpoint.network_key,
        ports=ports,
        rates=rates,
        endpoint=endpoint.endpoint_id,
        workload=(endpoint.pod.uid if endpoint.pod else "") or endpoint.container_id,
    )


def host_ports(mappings: Iterable[PortMapping]) -> tuple[PublishedPort, ...]:
    """The host ports of the capability `portMappings`."""
    return tuple(
        PublishedPort(
            protocol=protocol_number(mapping.protocol),
            port=mapping.host_port,
            target_port=mapping.container_port,
            address=parse_address(str(mapping.host_ip), field="hostIP") if mapping.host_ip else None,
        )
        for mapping in mappings
    )


def rate_limits(bandwidth: Bandwidth) -> RateLimits:
    """The rates of the capability `bandwidth`. CNI counts bursts in bits, tc and OVS in bytes."""
    return RateLimits(
        egress=bandwidth.egress_rate,
        egress_burst=bandwidth.egress_burst // 8,
        ingress=bandwidth.ingress_rate,
        ingress_burst=bandwidth.ingress_burst // 8,
    )


def check_host_ports_free(
    ports: tuple[PublishedPort, ...],
    attachments: Iterable[Attachment],
    *,
    endpoint: EndpointKey,
    reserved: Container[tuple[int, int]] = (),
) -> None:
    """`Conflict` when a host port is mapped to another endpoint already, is requested twice, or is `reserved`.

    Reserved are protocol and port of the host's own listeners, whatever their address: ours, and those of the operator.
    """
    if not ports:
        return  # the usual case: the scan below is linear in the attachments of the node
    for each in ports:
        if (each.protocol, each.port) in reserved:
            raise Conflict(
                f"port {protocol_name(each.protocol)}/{each.port} of the host is reserved "
                "(listeners of Weft and --reserved-host-ports of netplugin): choose another hostPort",
                field="portMappings",
            )
    for one, other in itertools.combinations(ports, 2):
        _check_distinct(one, other, "requested twice")
    for attachment in attachments:
        if attachment.config is not None and attachment.stage in HAS_PORT and attachment.key != endpoint:
            for one, other in itertools.product(ports, attachment.config.ports):
                _check_distinct(one, other, f"taken by {attachment.key}")


def _check_distinct(one: PublishedPort, other: PublishedPort, reason: str) -> None:
    if (one.protocol, one.port) == (other.protocol, other.port) and one.conflicts_with(other):
        raise Conflict(f"port {protocol_name(one.protocol)}/{one.port} of the host is {reason}", field="portMappings")


def plan_result(
    config: EndpointConfig,
    previous: result.Result | None,
    *,
    dns: result.Dns | None = None,
    gateways_serve_dns: bool = False,
) -> result.Result:
    """The CNI result: host interface and container interface, addresses and routes, behind those of earlier plugins.

    DNS is as the request asks, else as the previous result says, else by the gateways where `gateways_serve_dns`. An
    endpoint without a gateway keeps the resolvers of its runtime.
    """
    earlier = previous or result.Result()
    if dns is None and gateways_serve_dns and earlier.dns == result.Dns():
        dns = result.Dns(nameservers=tuple(str(address.gateway) for address in config.addresses if address.gateway))
    # The container interface comes second of ours; addresses refer to it by its index in the whole list.
    index = len(earlier.interfaces) + 1
    return result.Result(
        interfaces=(
            *earlier.interfaces,
            result.Interface(name=config.port.interface, mac=""),
            result.Interface(name=config.interface, mac=config.port.mac, sandbox=config.netns, mtu=config.mtu),
        ),
        addresses=(
            *earlier.addresses,
            *(
                result.Address(address=_interface(address), gateway=_gateway(address), interface=index)
                for address in config.addresses
            ),
        ),
        routes=(
            *earlier.routes,
            *(
                result.Route(
                    target=_DEFAULT_ROUTE[address.address.family]
                    if config.default_route
                    else _interface(address).network,
                    gateway=_gateway(address),
                )
                for address in config.addresses
                # The primary interface has the route to these subnets; a source-based rule leads to this one.
                if not config.shares_subnets
            ),
        ),
        dns=earlier.dns if dns is None else dns,
    )


def _interface(address: InterfaceAddress) -> result.IPInterface:
    return _INTERFACE[address.address.family]((address.address.number, address.length))


def _gateway(address: InterfaceAddress) -> result.IPAddress | None:
    return _ADDRESS[address.gateway.family](address.gateway.number) if address.gateway else None


def check_result(config: EndpointConfig, request: cni.Check) -> list[str]:
    """How the result that the runtime has kept differs from our record (C-082, C-083, C-087)."""
    differences = []
    if request.netns != config.netns:
        differences.append(f"the namespace is {request.netns}, attached was {config.netns}")
    for listed in request.prev_result.interfaces:
        # Interfaces without a sandbox are on the host, where another plugin may have one of the same name.
        if listed.name == config.interface and listed.sandbox:
            if listed.sandbox != request.netns:
                differences.append(f"prevResult has {listed.name} in {listed.sandbox}, not in {request.netns}")
            if listed.mac and listed.mac.lower() != config.port.mac:
                differences.append(f"prevResult has {listed.name} with MAC {listed.mac}, not {config.port.mac}")
    listed_addresses = {str(listed.address.ip) for listed in request.prev_result.addresses}
    differences += [
        f"address {address.address} is not in prevResult"
        for address in config.addresses
        if str(address.address) not in listed_addresses
    ]
    return differences
