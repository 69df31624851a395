"""Decodes EndpointSlices v1 and v1beta1, and v1 Endpoints of servers without slices, into one document type."""

from __future__ import annotations

import msgspec

from weft.adapters.kubernetes.objects import SERVICE_LABEL, Metadata, Named, Object
from weft.domain.ids import DEFAULT_TENANT
from weft.domain.loadbalancer.kube_objects import Conditions, EndpointSlice, KubeSlice, SliceEndpoint, SlicePort

# Topology key with the node's name: v1beta1 has no `nodeName`.
_HOSTNAME = "kubernetes.io/hostname"


class _Slice(EndpointSlice, frozen=True, kw_only=True):
    """A v1 EndpointSlice with its metadata."""

    metadata: Metadata


class _OldEndpoint(SliceEndpoint, frozen=True, kw_only=True):
    topology: dict[str, str] | None = None


class _OldSlice(Named, frozen=True, kw_only=True):
    """A v1beta1 EndpointSlice."""

    address_type: str = "IP"
    endpoints: tuple[_OldEndpoint, ...] | None = None
    ports: tuple[SlicePort, ...] | None = None


class _Address(Object, frozen=True, kw_only=True):
    ip: str
    hostname: str = ""
    node_name: str = ""


class _Subset(Object, frozen=True, kw_only=True):
    addresses: tuple[_Address, ...] = ()
    not_ready_addresses: tuple[_Address, ...] = ()
    ports: tuple[SlicePort, ...] = ()


class _Endpoints(Named, frozen=True, kw_only=True):
    """A v1 Endpoints."""

    subsets: tuple[_Subset, ...] | None = None


_decode_slice = msgspec.json.Decoder(_Slice).decode
_decode_old_slice = msgspec.json.Decoder(_OldSlice).decode
_decode_endpoints = msgspec.json.Decoder(_Endpoints).decode


def decode_slice(data: bytes) -> KubeSlice | None:
    """Decode a discovery.k8s.io/v1 EndpointSlice; None when it belongs to no Service."""
    decoded = _decode_slice(data)
    return _document(
        decoded.metadata,
        EndpointSlice(address_type=decoded.address_type, endpoints=decoded.endpoints, ports=decoded.ports),
    )


def decode_slice_v1beta1(data: bytes) -> KubeSlice | None:
    """Decode a v1beta1 EndpointSlice (servers before 1.21); None when it belongs to no Service, or has no addresses."""
    decoded = _decode_old_slice(data)
    endpoints = [
        SliceEndpoint(
            addresses=endpoint.addresses,
            conditions=endpoint.conditions,
            node_name=endpoint.node_name or (endpoint.topology or {}).get(_HOSTNAME, ""),
            hostname=endpoint.hostname,
        )
        for endpoint in decoded.endpoints or ()
    ]
    # The first v1beta1 had the address type `IP`, which meant IPv4; `FQDN` endpoints have no address to balance to.
    family = "IPv4" if decoded.address_type == "IP" else decoded.address_type
    if family not in {"IPv4", "IPv6"}:
        return None
    return _document(
        decoded.metadata,
        EndpointSlice(
            address_type="IPv6" if family == "IPv6" else "IPv4", endpoints=tuple(endpoints), ports=decoded.ports
        ),
    )


def decode_endpoints(data: bytes) -> KubeSlice | None:
    """Decode the IPv4 addresses of a v1 Endpoints as one slice."""
    decoded = _decode_endpoints(data)
    subsets = decoded.subsets or ()
    endpoints = tuple(
        SliceEndpoint(
            addresses=(address.ip,),
            conditions=Conditions(ready=is_ready),
            node_name=address.node_name,
            hostname=address.hostname,
        )
        for subset in subsets
        for is_ready, addresses in ((True, subset.addresses), (False, subset.not_ready_addresses))
        for address in addresses
        if ":" not in address.ip
    )
    # A slice has one list of ports, Endpoints have one per subset: ports that only a later subset has are lost.
    ports = subsets[0].ports if subsets else ()
    # Endpoints have the name of their Service instead of a label.
    labelled = msgspec.structs.replace(decoded.metadata, labels={SERVICE_LABEL: decoded.metadata.name})
    return _document(labelled, EndpointSlice(address_type="IPv4", endpoints=endpoints, ports=ports))


def _document(metadata: Metadata, value: EndpointSlice) -> KubeSlice | None:
    service = metadata.labels.get(SERVICE_LABEL, "")
    if not service:
        return None
    return KubeSlice(
        tenant=DEFAULT_TENANT,
        namespace=metadata.namespace,
        service_name=service,
        name=metadata.name,
        foreign=metadata.is_foreign,
        slice=value,
    )
