"""Whether a workload may resolve external names: only if its egress policy lets it reach an upstream resolver itself.

netdns forwards queries in the workload's place. Without this check it would carry data out of a network that has no
egress (CVE-2024-29018).
"""

from __future__ import annotations

from collections.abc import Collection

from weft.domain import model
from weft.domain.addresses import Address
from weft.domain.dns.names import DnsEgressDenied, Transports
from weft.domain.ids import NodeName
from weft.domain.policy.engine.decide import Flow
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.model.identities import IdentityKey
from weft.domain.policy.model.protocols import TCP, UDP
from weft.domain.policy.model.rules import Action, Direction

DNS_PORT = 53
_PROTOCOLS = {Transports.UDP: UDP, Transports.TCP: TCP}


def dns_egress_denied_by(engine: Engine, *, node: NodeName, resolvers: Collection[Address]) -> DnsEgressDenied:
    """Return a check by which transports an endpoint of this node may reach none of the resolvers.

    Endpoints of other nodes query their own node's netdns, so they are not checked here.
    """

    def dns_egress_denied(endpoint: model.Endpoint) -> Transports:
        if endpoint.host != node:
            return Transports.NONE
        source = engine.workloads.get(IdentityKey(str(endpoint.key)))
        # Fail closed: an endpoint that the engine does not know has no rules yet.
        if source is None:
            return Transports.BOTH
        denied = Transports.BOTH
        for resolver in resolvers:
            target = engine.directory.at(resolver, tenant=endpoint.tenant)
            for transport, protocol in _PROTOCOLS.items():
                # One reachable resolver is enough. netdns forwards a query by the transport it came by.
                flow = Flow(source=source, target=target, protocol=protocol, port=DNS_PORT, version=resolver.family)
                if transport in denied and engine.deciding_rule(flow, Direction.EGRESS).action is Action.ALLOW:
                    denied &= ~transport
        return denied

    return dns_egress_denied
