"""The names of this node's tenants, on their way to netdns: fed with the cluster's news and the coming of spaces.

Nobody asks outside through netdns who could not do so by itself (CVE-2024-29018): that follows from the rules of the
workload, which are known a moment later than its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from weft.agent.dataplane.policy import TenantPolicy
from weft.agent.dns.zone_push import NamePusher
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.dns.cluster_names import CLUSTER_DOMAIN
from weft.domain.ids import NodeName, TenantName
from weft.domain.policy.engine.engine_sync import CONCERNED_FOLDERS, SHARED_FOLDERS
from weft.domain.store_types import Change, Listing
from weft.runtime.store.mirror import Sink

# What changes the rules of workloads, but not their names.
_RULE_FOLDERS = CONCERNED_FOLDERS - {kinds.ENDPOINT.prefix, kinds.NETWORK.prefix}


class Names:
    """A sink in front of the agent's own, to which it hands everything on first, and a `NetnsObserver`."""

    def __init__(
        self,
        sink: Sink,
        *,
        socket: Path,
        cluster: Cluster,
        node: NodeName,
        policies: Mapping[TenantName, TenantPolicy],
        domain: str = CLUSTER_DOMAIN,
    ) -> None:
        self._sink = sink
        self._node = node
        self._policies = policies
        self._pusher = NamePusher(cluster, socket=socket, dns_egress_denied=self._keeps_in, domain=domain)
        self._tenants: frozenset[TenantName] | None = None
        self._replaced = False

    @property
    def follows(self) -> bool:
        """Whether netdns is there and knows the names."""
        return self._pusher.follows

    async def run(self) -> None:
        """Tell netdns for ever. To be begun when the node is restored."""
        await self._pusher.run()

    async def inspect(self) -> dict[str, Any]:
        """`/inspect/nameserver` (contiv 6.7). `Unavailable` while netdns is away."""
        return await self._pusher.inspect()

    def replace(self, listing: Listing) -> None:
        """All is told anew as soon as the rules that follow from it are known."""
        self._sink.replace(listing)
        self._replaced = True

    def apply(self, change: Change) -> None:
        self._sink.apply(change)
        self._pusher.apply(change)
        for event in change.events:
            folder, _, rest = event.key.partition("/")
            if folder in _RULE_FOLDERS:
                self._pusher.touch_rules(TenantName(rest.partition("/")[0]))
            elif folder in SHARED_FOLDERS:
                for tenant in self._tenants or ():
                    self._pusher.touch_rules(tenant)

    async def leave(self, *, but: Set[TenantName]) -> None:
        if self._tenants is None:
            self._tenants = await self._pusher.served()  # told by an agent before us
        leaving, self._tenants = self._tenants - but, self._tenants & but
        for tenant in leaving:
            await self._pusher.withdraw(tenant)

    def enter(self, tenants: Set[TenantName], *, anew: bool = False) -> None:
        known = self._tenants or frozenset()
        for tenant in known - tenants:
            self._pusher.forget(tenant)  # its last workload left while we were leaving others
        again = anew or self._replaced
        for tenant in tenants if again else tenants - known:
            self._pusher.add_endpoint(tenant)
        self._tenants, self._replaced = frozenset(tenants), False

    def add_endpoint(self, endpoint: model.Endpoint) -> None:
        self._pusher.expect(endpoint)

    def dismiss(self, endpoint: model.Endpoint) -> None:
        self._pusher.expect_no_more(endpoint.key)

    def _keeps_in(self, endpoint: model.Endpoint) -> bool:
        policy = self._policies.get(endpoint.tenant)
        if policy is None:  # not known yet: it asks nobody
            return endpoint.host == self._node
        return policy.dns_egress_denied(endpoint, self._pusher.resolvers)
