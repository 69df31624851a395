"""Drop log: attributes dropped packets to rules and endpoints, keeps the latest, and streams them to followers.

Names are those of the moment at which the datapath is polled, some hundredths of a second after the drop. Everything is
bounded, and no slow reader can block the agent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import msgspec

from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.policy import TenantPolicy
from weft.agent.store.attachment_store import AttachmentStore
from weft.domain import kinds, model
from weft.domain.addresses import Address
from weft.domain.cluster import Cluster
from weft.domain.errors import DatapathFault, Unavailable
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, TenantName
from weft.domain.policy.compile.kubernetes import is_isolation
from weft.domain.policy.model.identities import Identity, Kind, identity_of_world
from weft.domain.policy.model.protocols import service_name
from weft.domain.policy.model.rules import Direction
from weft.ports.datapath import Drop, PartialResult
from weft.runtime.backoff import wait_event
from weft.runtime.logs import Log

log = Log("drops")

# How many drops the log keeps.
MAX_RECORDS = 1000
MAX_FOLLOWERS = 16
# How many drops a follower may leave unread; a slower one is disconnected.
MAX_UNREAD = 500

TOO_SLOW = "disconnected: drops arrive faster than they are read"
STOPPING = "the agent is shutting down"

# The meaning of the drop reasons that are not policy rules. A test compares them with those of the datapaths.
DROP_REASON_TEXTS: Final = {
    "weft/spoofed": "the source address or MAC is not the sender's own",
    "weft/rogue-ra": "the sender sent a router advertisement or redirect",
    "weft/invalid": "conntrack state is invalid or untracked",
    "weft/overlay-transit": "it came from one node and was routed to another",
    "weft/endpoint-not-ready": "no endpoint at that address is ready",
    "weft/unknown-identity": "policy was deferred to this node, but it does not know the source either",
    "weft/cross-network": "there is no routing between networks in bridge mode",
    "weft/unknown-vtep": "a packet to the tunnel port that no node's tunnel has sent",
    "weft/no-route": "the datapath has no route for it",
    "weft/policy-race": "the policy changed repeatedly while it was evaluated",
}
_UNKNOWN_RULE = "weft/unknown"
_SIDES: Final = {Direction.EGRESS: "at source", Direction.INGRESS: "at destination"}


class End(msgspec.Struct, frozen=True, kw_only=True):
    """Source or destination of a dropped packet: its policy identity, and its pod or container name if it has one."""

    address: str
    port: int
    identity: str
    pod: str = ""

    def matches(self, text: str) -> bool:
        """Whether the text names this end: by address, key, endpoint id, pod, or namespace and pod."""
        # Operators copy any of these from `kubectl`, `netctl` or a log line.
        names = {self.address, self.identity, self.identity.rpartition(":")[2], self.pod, self.pod.partition("/")[2]}
        return text in names


class DropRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A dropped packet as operators see it. `direction` is empty where no policy decided."""

    at: float
    tenant: TenantName
    rule: str
    reason: str
    protocol: int
    service: str
    source: End
    target: End
    direction: str = ""
    in_iface: str = ""
    out_iface: str = ""


class DropFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects drops; an empty field matches all. `since` is in seconds since the epoch."""

    tenant: str = ""
    pod: str = ""
    since: float = 0.0

    def matches(self, drop: DropRecord) -> bool:
        return (
            (not self.tenant or drop.tenant == self.tenant)
            and (not self.pod or drop.source.matches(self.pod) or drop.target.matches(self.pod))
            and drop.at >= self.since
        )


class Follower:
    """A reader that gets drops as they happen."""

    def __init__(self, matching: DropFilter) -> None:
        self._matching = matching
        self._unread: list[DropRecord] = []
        self._news = asyncio.Event()
        # Why the stream has ended; empty while it goes on.
        self.ended = ""

    def offer(self, drop: DropRecord) -> None:
        """Queue a drop. Never blocks: a full queue ends the stream."""
        # A slow reader must never block the agent, so nothing waits here.
        if self.ended or not self._matching.matches(drop):
            return
        if len(self._unread) >= MAX_UNREAD:
            self.end(TOO_SLOW)
            return
        self._unread.append(drop)
        self._news.set()

    def end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self._news.set()

    async def take(self, *, within: float) -> list[DropRecord]:
        """The drops since the last call; none after so many seconds without one, or when the stream has ended."""
        await wait_event(self._news, within=within)
        self._news.clear()
        taken, self._unread = self._unread, []
        return taken


class DropLog:
    """The latest drops, and their followers."""

    def __init__(self) -> None:
        # A ring buffer: a flood of drops overwrites the oldest.
        self._kept: deque[DropRecord] = deque(maxlen=MAX_RECORDS)
        self._followers: set[Follower] = set()
        # All that the datapath has logged since the start. At high rates it logs a sample.
        self.total = 0

    @property
    def followers(self) -> int:
        return len(self._followers)

    def add(self, drops: Iterable[DropRecord]) -> None:
        for drop in drops:
            self.total += 1
            self._kept.append(drop)
            for follower in self._followers:
                follower.offer(drop)

    def recent(self, matching: DropFilter) -> list[DropRecord]:
        """The matching drops, oldest first."""
        return [drop for drop in self._kept if matching.matches(drop)]

    @contextmanager
    def following(self, matching: DropFilter) -> Iterator[Follower]:
        """A follower from now on; `Unavailable` when there are too many already."""
        if self.followers >= MAX_FOLLOWERS:
            raise Unavailable(f"too many followers ({MAX_FOLLOWERS})")
        follower = Follower(matching)
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)

    def end_all(self) -> None:
        """End all streams: the agent is shutting down."""
        for follower in self._followers:
            follower.end(STOPPING)


class DropAttributor:
    """Maps the datapath's verdict ids and addresses to rules and endpoints, as this node knows them at the moment."""

    def __init__(
        self, cluster: Cluster, *, attachment_store: AttachmentStore, policies: Mapping[TenantName, TenantPolicy]
    ) -> None:
        self._cluster = cluster
        self._attachment_store = attachment_store
        self._policies = policies

    def attribute(self, drops: Iterable[Drop]) -> list[DropRecord]:
        """The same drops in the same order."""
        senders = {
            (attachment.config.port.tenant, attachment.config.port.interface): attachment.endpoint
            for attachment in self._attachment_store
            if attachment.config is not None
        }
        return [self._attribute(drop, senders.get((drop.tenant, drop.in_iface))) for drop in drops]

    def _attribute(self, drop: Drop, sender: model.Endpoint | None) -> DropRecord:
        rule, direction, reason = self._explain(drop)
        source = self._end(drop.tenant, drop.source, drop.source_port)
        if sender is not None:  # the port identifies it, even if the source address is spoofed
            source = msgspec.structs.replace(source, identity=str(sender.key), pod=sender.container_name)
        return DropRecord(
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
        """The rule, its direction, and the reason as text."""
        if drop.reason:
            return drop.reason, "", DROP_REASON_TEXTS.get(drop.reason, drop.reason)
        # Verdict ids are of this node's policy map, which keeps deleted ones for a while.
        policy = self._policies.get(drop.tenant)
        verdict = policy.policy_map.verdicts.get(drop.verdict_id) if policy else None
        if verdict is None:
            return _UNKNOWN_RULE, "", f"a deleted rule denied it (verdict {drop.verdict_id:#x})"
        side = f"{verdict.direction} {_SIDES[verdict.direction]}"
        if is_isolation(verdict.rule):
            return verdict.rule, verdict.direction, f"denied by default: no rule allows it ({side})"
        return verdict.rule, verdict.direction, f"the rule denies it ({side})"

    def _end(self, tenant: TenantName, address: Address, port: int) -> End:
        policy = self._policies.get(tenant)
        identity = policy.engine.directory.at(address, tenant=tenant) if policy else identity_of_world(address)
        return End(address=str(address), port=port, identity=identity.key, pod=self._pod(identity))

    def _pod(self, identity: Identity) -> str:
        if identity.kind is not Kind.WORKLOAD:
            return ""
        tenant, colon, rest = identity.key.partition(":")
        if not colon:
            return identity.key  # named by an orchestrator
        network, _, endpoint = rest.partition(":")
        key = EndpointKey(TenantName(tenant), NetworkName(network), EndpointId(endpoint))
        if attachment := self._attachment_store.get(key):
            return attachment.endpoint.container_name
        stored = self._cluster.get(kinds.ENDPOINT, *key)
        return stored.value.container_name if stored else ""


class DropReader:
    """Reads drops from the datapath into the drop log. A fault is logged once and stops nothing else."""

    def __init__(self, executor: DatapathExecutor, *, attributor: DropAttributor, drops: DropLog) -> None:
        self._executor = executor
        self._attributor = attributor
        self._drops = drops
        self._fault = ""

    async def poll(self) -> None:
        """Log the packets that were dropped since the last call."""
        # A partial result still has the drops of the tenants that could be read.
        fault, dropped = "", list[Drop]()
        try:
            dropped = await self._executor.call(lambda datapath: datapath.drops())
        except DatapathFault as error:
            fault = error.message
            dropped = error.drops if isinstance(error, PartialResult) else []
            if fault != self._fault:
                log.error("drop log unavailable", reason=fault)
        self._fault = fault
        if dropped:
            self._drops.add(self._attributor.attribute(dropped))
