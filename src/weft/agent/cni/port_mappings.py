"""What a caller wished for the traffic of its workload, as the datapath takes it; ports of the host are given once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from weft.agent.store.attachment_store import WIRED, AttachmentStore
from weft.cni.portmap_bandwidth import Bandwidth, PortMapping
from weft.domain.addresses import parse_address
from weft.domain.desired.state import RateLimits
from weft.domain.errors import Conflict
from weft.domain.host_access.view import PublishedPort
from weft.domain.ids import EndpointKey
from weft.domain.policy.model.protocols import protocol_name, protocol_number


def published_ports(mappings: Iterable[PortMapping]) -> tuple[PublishedPort, ...]:
    """The wished ports of the host."""
    return tuple(
        PublishedPort(
            protocol=protocol_number(each.protocol),
            port=each.host_port,
            target_port=each.container_port,
            address=parse_address(str(each.host_ip), field="hostIP") if each.host_ip else None,
        )
        for each in mappings
    )


def wished_rates(bandwidth: Bandwidth) -> RateLimits:
    """The wished rates; bursts come in bits."""
    return RateLimits(
        out=bandwidth.egress_rate,
        out_burst=bandwidth.egress_burst // 8,
        into=bandwidth.ingress_rate,
        into_burst=bandwidth.ingress_burst // 8,
    )


def refuse_taken_ports(ports: tuple[PublishedPort, ...], journal: AttachmentStore, *, but: EndpointKey) -> None:
    """`Conflict` when a port of the host leads to another workload already, or is asked for twice."""
    if not ports:
        return
    for one, other in itertools.combinations(ports, 2):
        _refuse_same(one, other, "asked for twice")
    for note in journal:
        if note.wiring is not None and note.stage in WIRED and note.key != but:
            for one, other in itertools.product(ports, note.wiring.ports):
                _refuse_same(one, other, f"taken by {note.key}")


def _refuse_same(one: PublishedPort, other: PublishedPort, reason: str) -> None:
    if (one.protocol, one.port) == (other.protocol, other.port) and one.meets(other):
        raise Conflict(f"port {protocol_name(one.protocol)}/{one.port} of the host is {reason}", field="portMappings")
