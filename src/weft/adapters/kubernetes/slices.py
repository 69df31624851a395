"""EndpointSlices of v1 and v1beta1, and Endpoints of servers that have none of them -> the same document."""

from __future__ import annotations

import msgspec

from weft.adapters.kubernetes.objects import SERVICE_LABEL, Metadata, Named, Object
from weft.domain.ids import DEFAULT_TENANT
from weft.domain.loadbalancer.kube_objects import Conditions, EndpointSlice, KubeSlice, SliceEndpoint, SlicePort

# In the topology of v1beta1: the node.
_HOSTNAME = "kubernetes.io/hostname"


class _Slice(EndpointSlice, frozen=True, kw_only=True):
    """A slice with its metadata."""

    metadata: Metadata


class _OldEndpoint(SliceEndpoint, frozen=True, kw_only=True):
    topology: dict[str, str] | None = None


class _OldSlice(Named, frozen=True, kw_only=True):
    """A v1beta1 slice."""

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


_slice = msgspec.json.Decoder(_Slice).decode
_old_slice = msgspec.json.Decoder(_OldSlice).decode
_endpoints = msgspec.json.Decoder(_Endpoints).decode


def read_slice(data: bytes) -> KubeSlice | None:
    """A discovery.k8s.io/v1 EndpointSlice; None when it is no service's."""
    found = _slice(data)
    return _document(
        found.metadata,
        EndpointSlice(address_type=found.address_type, endpoints=found.endpoints, ports=found.ports),
    )


def read_slice_v1beta1(data: bytes) -> KubeSlice | None:
    """As `read_slice`, from a server before 1.21: the node is in the topology, and `IP` was a type of addresses."""
    found = _old_slice(data)
    endpoints = [
        SliceEndpoint(
            addresses=each.addresses,
            conditions=each.conditions,
            node_name=each.node_name or (each.topology or {}).get(_HOSTNAME, ""),
            hostname=each.hostname,
        )
        for each in found.endpoints or ()
    ]
    family = "IPv4" if found.address_type == "IP" else found.address_type
    if family not in {"IPv4", "IPv6"}:
        return None
    return _document(
        found.metadata,
        EndpointSlice(
            address_type="IPv6" if family == "IPv6" else "IPv4", endpoints=tuple(endpoints), ports=found.ports
        ),
    )


def read_endpoints(data: bytes) -> KubeSlice | None:
    """A v1 Endpoints of v4 as one slice. Subsets whose ports differ lose those that the first one does not have."""
    found = _endpoints(data)
    subsets = found.subsets or ()
    endpoints = tuple(
        SliceEndpoint(
            addresses=(each.ip,),
            conditions=Conditions(ready=is_ready),
            node_name=each.node_name,
            hostname=each.hostname,
        )
        for subset in subsets
        for is_ready, addresses in ((True, subset.addresses), (False, subset.not_ready_addresses))
        for each in addresses
        if ":" not in each.ip
    )
    ports = subsets[0].ports if subsets else ()
    labelled = msgspec.structs.replace(found.metadata, labels={SERVICE_LABEL: found.metadata.name})
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
