"""From the datapath's numbers and addresses to names: which rule refused a packet, and who was at both ends.

The names are those of the moment in which the datapath is asked, a few hundredths of a second later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.policy import TenantPolicy
from weft.agent.observe.drops import DropLog, End, NamedDrop
from weft.agent.store.attachment_store import AttachmentStore
from weft.domain import kinds, model
from weft.domain.addresses import Address
from weft.domain.cluster import Cluster
from weft.domain.errors import DatapathFault
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, TenantName
from weft.domain.policy.compile.kubernetes import is_isolation
from weft.domain.policy.model.identities import Identity, Kind, identity_of_world
from weft.domain.policy.model.protocols import service_name
from weft.domain.policy.model.rules import Direction
from weft.ports.datapath import Drop, PartialResult
from weft.runtime.logs import Log

log = Log("drops")

# What the datapath's own reasons mean.
OWN_REASONS: Final = {
    "weft/spoofed": "the sender spoke with an address or MAC that is not its own",
    "weft/router": "the sender spoke as only a router may",
    "weft/invalid": "it belongs to no connection",
    "weft/transit": "it came from one node and was to go on to another",
    "weft/not-ready": "nobody is ready at that address, or not any more",
    "weft/stranger": "the node it came from does not know its target, and this one does not know its source",
    "weft/other-network": "nobody routes between networks in bridge mode",
    "weft/nowhere": "the datapath knows no way for it",
    "weft/unsure": "the policy changed again and again while it was judged",
}
_FORGOTTEN_RULE = "weft/unknown"
_SIDES: Final = {Direction.EGRESS: "of the side that asks", Direction.INGRESS: "of the side that answers"}


class DropAttributor:
    """Finds the names, from what this node knows at the moment."""

    def __init__(
        self, cluster: Cluster, *, journal: AttachmentStore, policies: Mapping[TenantName, TenantPolicy]
    ) -> None:
        self._cluster = cluster
        self._journal = journal
        self._policies = policies

    def name(self, drops: Iterable[Drop]) -> list[NamedDrop]:
        """The same drops in the same order."""
        speakers = {
            (note.wiring.port.tenant, note.wiring.port.interface): note.endpoint
            for note in self._journal
            if note.wiring is not None
        }
        return [self._name(drop, speakers.get((drop.tenant, drop.in_iface))) for drop in drops]

    def _name(self, drop: Drop, speaker: model.Endpoint | None) -> NamedDrop:
        rule, direction, reason = self._explain(drop)
        source = self._end(drop.tenant, drop.source, drop.source_port)
        if speaker is not None:  # whatever address it spoke with
            source = msgspec.structs.replace(source, identity=str(speaker.key), pod=speaker.container_name)
        return NamedDrop(
            at=drop.at,
            tenant=drop.tenant,
            rule=rule,
            reason=reason,
            direction=direction,
            protocol=drop.protocol,
            service=service_name(drop.protocol, drop.target_port),
            source=source,
            target=self._end(drop.tenant, drop.target, drop.target_port),
            in_iface=drop.in_iface,
            out_iface=drop.out_iface,
        )

    def _explain(self, drop: Drop) -> tuple[str, str, str]:
        """The rule, its direction, and what that means in words."""
        if drop.reason:
            return drop.reason, "", OWN_REASONS.get(drop.reason, drop.reason)
        policy = self._policies.get(drop.tenant)
        outcome = policy.tables.outcomes.get(drop.outcome) if policy else None
        if outcome is None:
            return _FORGOTTEN_RULE, "", f"a rule that is gone denied it (outcome {drop.outcome:#x})"
        side = f"{outcome.direction} {_SIDES[outcome.direction]}"
        if is_isolation(outcome.rule):
            return outcome.rule, outcome.direction, f"denied by default: no rule allows it ({side})"
        return outcome.rule, outcome.direction, f"the rule denies it ({side})"

    def _end(self, tenant: TenantName, address: Address, port: int) -> End:
        policy = self._policies.get(tenant)
        holder = policy.engine.directory.at(address, tenant=tenant) if policy else identity_of_world(address)
        return End(address=str(address), port=port, identity=holder.key, pod=self._pod(holder))

    def _pod(self, holder: Identity) -> str:
        if holder.kind is not Kind.WORKLOAD:
            return ""
        tenant, colon, rest = holder.key.partition(":")
        if not colon:
            return holder.key  # an orchestrator named it
        network, _, endpoint = rest.partition(":")
        key = EndpointKey(TenantName(tenant), NetworkName(network), EndpointId(endpoint))
        if note := self._journal.get(key):
            return note.endpoint.container_name
        stored = self._cluster.get(kinds.ENDPOINT, *key)
        return stored.value.container_name if stored else ""


class DropReader:
    """Fetches what the datapath has to tell. That it tells nothing is said once, and holds up nothing else."""

    def __init__(self, kernel: DatapathExecutor, *, naming: DropAttributor, drops: DropLog) -> None:
        self._kernel = kernel
        self._naming = naming
        self._drops = drops
        self._fault = ""

    async def listen(self) -> None:
        """Take in what was refused since the last time."""
        fault, refused = "", list[Drop]()
        try:
            refused = await self._kernel.call(lambda datapath: datapath.drops())
        except DatapathFault as error:
            fault = error.message
            refused = error.drops if isinstance(error, PartialResult) else []
            if fault != self._fault:
                log.error("refused packets are not heard of", reason=fault)
        self._fault = fault
        if refused:
            self._drops.add(self._naming.name(refused))
