"""Whether a workload may ask about names of the outside: only where it could ask the resolver by itself.

Whoever answers in its stead would otherwise carry words out of a network that has no way out (CVE-2024-29018).
"""

from __future__ import annotations

from collections.abc import Collection

from weft.domain import model
from weft.domain.addresses import Address
from weft.domain.dns.names import KeepsIn
from weft.domain.ids import NodeName
from weft.domain.policy.engine.decide import Flow
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.model.identities import IdentityKey
from weft.domain.policy.model.protocols import UDP
from weft.domain.policy.model.rules import Action, Direction

DNS_PORT = 53


def kept_in_by(engine: Engine, *, node: NodeName, resolvers: Collection[Address]) -> KeepsIn:
    """Whether an endpoint of this node may ask none of the resolvers. One that has no rules yet may ask nobody.

    Endpoints of other nodes ask there, and are not looked at.
    """

    def dns_egress_denied(endpoint: model.Endpoint) -> bool:
        if endpoint.host != node:
            return False
        source = engine.workloads.get(IdentityKey(str(endpoint.key)))
        if source is None:
            return True
        for resolver in resolvers:
            target = engine.directory.at(resolver, tenant=endpoint.tenant)
            flow = Flow(source=source, target=target, protocol=UDP, port=DNS_PORT, version=resolver.family)
            if engine.deciding(flow, Direction.EGRESS).action is Action.ALLOW:
                return False
        return True

    return dns_egress_denied
