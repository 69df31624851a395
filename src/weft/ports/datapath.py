"""The Datapath port: what carries packets on a node, told in parts (`weft.domain.desired.state`).

Contract, for every adapter:

- Calls block and come from one thread: the agent has one of its own for this. Every call ends in bounded time.
- Each names an end state; "already so" is success. Failures raise `DatapathFault` and may leave a part of it done: the
  same call may be made again, and `converge` mends whatever was left.
- `converge` needs no memory of earlier calls: it finds everything of ours, and touches nothing of others'.
- A port lets nothing through before it is whole: both ends are wired, then its checks and its policy let it speak and
  be spoken to, all at once.
- Policy parts (`weft.domain.policy.policymap.policy_state`) given together come into force together: no packet meets a half of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Protocol

import msgspec

from weft.domain.addresses import Address
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import NO_RATES, Port, RateLimits, StateItem
from weft.domain.errors import DatapathFault, WeftError
from weft.domain.host_access.view import PublishedPort
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import FrontendKey

_ICMP, _ICMPV6 = 1, 58
NO_CHANGE: Difference[StateItem] = Difference((), ())


class InterfaceAddress(msgspec.Struct, frozen=True):
    """An address as the workload gets it. Without a gateway its way out is the node itself."""

    address: Address
    length: int
    gateway: Address | None = None


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One workload's attachment from end to end."""

    port: Port
    # Path of the workload's network namespace.
    netns: str
    # The interface's name in there.
    interface: str
    addresses: tuple[InterfaceAddress, ...]
    mtu: int
    # What the interface is called beside its name, where that had to be shortened.
    full_name: str = ""
    # Whether everything leaves through it, or, beside another interface that has that part, its own subnets only.
    default_route: bool = True
    # Whether that other interface is in the same subnets: then only what speaks from its own addresses leaves here.
    shares_subnets: bool = False
    # Ports of the host that lead to it.
    ports: tuple[PublishedPort, ...] = ()
    # How fast it may send and be sent to, whatever its group's profile says.
    rates: RateLimits = NO_RATES
    # The endpoint's id, for people who look at the device from the other side.
    endpoint: str = ""
    # Whose it is: the pod's UID where there is one, else the container (S-20).
    workload: str = ""


class PlugRequest(msgspec.Struct, frozen=True):
    """A workload to be wired, and what comes into force with its port."""

    wiring: EndpointConfig
    policy: Difference[StateItem] = NO_CHANGE


class DriftReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `converge` met: what it mended, in words, and the ports that are wanted and not plugged."""

    repaired: tuple[str, ...] = ()
    missing: frozenset[Port] = frozenset()


class Drop(msgspec.Struct, frozen=True, kw_only=True):
    """A packet that was refused. `outcome` is that of a policy row, or 0 with one of our own `reason`s."""

    tenant: TenantName
    outcome: int
    reason: str
    source: Address
    target: Address
    protocol: int
    source_port: int = 0
    target_port: int = 0
    in_iface: str = ""
    out_iface: str = ""
    # Seconds since the epoch, by the clock of this machine.
    at: float = 0.0


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The first packet of a connection that a workload of this node might open."""

    port: Port
    source: Address
    target: Address
    protocol: int
    target_port: int = 0

    @property
    def is_echo(self) -> bool:
        """Whether it is an echo request."""
        return self.protocol == (_ICMP if self.source.family == 4 else _ICMPV6)


class PartialResult(DatapathFault):
    """What was refused in some tenants' spaces could not be read; `drops` are those of the others."""

    def __init__(self, message: str, drops: list[Drop]) -> None:
        super().__init__(message)
        self.drops = drops


class VerdictCounters(msgspec.Struct, frozen=True, kw_only=True):
    """How many packets met an outcome of policy, and how many were refused for one of our own reasons.

    A connection that was let pass may be judged anew only when policy changes: it meets its outcome that often.
    """

    tenant: TenantName
    outcomes: dict[int, int]
    reasons: dict[str, int]


class ServiceFlowStats(msgspec.Struct, frozen=True, kw_only=True):
    """What passed between a client and one that answers it for a service, of late: in to the service, and out of it."""

    tenant: TenantName
    client: Address
    front: FrontendKey
    provider: Address
    packets_in: int
    octets_in: int
    packets_out: int
    octets_out: int


class SpaceSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's space as it is found: host ends of workloads, other devices, and what is amiss, in words."""

    tenant: TenantName
    ports: tuple[str, ...]
    devices: tuple[str, ...]
    faults: tuple[str, ...] = ()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at on a machine, and how it is."""

    name: str
    text: str
    # What to do about it; nothing where all is well.
    remedy: str = ""
    # Whether nothing works before that is done.
    stops_us: bool = True


class DatapathTools(Protocol):
    """What a datapath offers to a person at the machine, whether an agent runs or not."""

    def probe(self) -> list[str]:
        """What this machine lacks for the datapath to work, in words. Leaves nothing behind."""
        ...

    def hazards(self) -> list[str]:
        """What is on this machine that is not of ours and may stop our packets, in words."""
        ...

    def examine(self, switch: Path) -> Iterator[Finding]:
        """How the switch is whose sockets are in the directory; nothing where the datapath needs none."""
        ...

    def enter(self, directory: Path, tenant: TenantName) -> None:
        """Move the calling thread into a tenant's space, for good; `NotFound` when it is not on this node."""
        ...

    def enter_host_ends(self, directory: Path, tenant: TenantName) -> None:
        """The same, to where the host ends of a tenant's workloads are: its space, or the machine itself."""
        ...

    def enter_workload(self, netns: Path) -> None:
        """Move the calling thread into a workload's network namespace, for good; `NotFound` when it is gone."""
        ...

    def vacate(self, directory: Path) -> None:
        """Take away the directory in which tenants' spaces were; `DatapathFault` while one is there."""
        ...


class Datapath(Protocol):
    """See the module's contract."""

    @property
    def mtu(self) -> int:
        """What workloads can send without their packets being cut."""
        ...

    def converge(self, wanted: Set[StateItem]) -> DriftReport:
        """Read everything of ours, and make it what is wanted. Ports cannot be made here: missing ones are told."""
        ...

    def apply(self, difference: Difference[StateItem]) -> None:
        """Put and drop parts, knowing that the rest is as it was. Ports come and go by `plug` and `unplug`."""
        ...

    def settle(self) -> None:
        """Return when all that was told before holds for every packet, of older connections too.

        A datapath may remember for a moment what it did with earlier packets.
        """
        ...

    def plug(self, wiring: EndpointConfig, policy: Difference[StateItem] = NO_CHANGE) -> None:
        """Wire a workload, whose tenant's space is there; its policy and its shape come into force with the port.

        `Conflict` when its interface is taken, `NotFound` when its namespace is gone; nothing has changed then.
        """
        ...

    def plug_together(self, pluggings: Sequence[PlugRequest]) -> Iterator[WeftError | None]:
        """Plug workloads in their order, sharing what can be shared; for each, when it is known, why it failed or None.

        Nothing is begun before the first answer is taken, and all is done when the last one is.
        """
        ...

    def unplug(self, wiring: EndpointConfig, policy: Difference[StateItem] = NO_CHANGE) -> None:
        """Take a workload off: its interface's name is free again, nothing of it speaks any more.

        Whoever gets its addresses next inherits no connection of it.
        """
        ...

    def drops(self) -> list[Drop]:
        """What was refused since the last call, oldest first; a sample when it is much.

        `PartialResult` when it is not known for some tenants, with what is known.
        """
        ...

    def trace(self, question: Question) -> str | Drop:
        """What would become of a packet: the device it would leave by, or its refusal. Nothing is sent.

        `Unavailable` where the datapath can only be tried out.
        """
        ...

    def counters(self) -> list[VerdictCounters]:
        """The counts of each tenant's space."""
        ...

    def service_uses(self) -> list[ServiceFlowStats]:
        """Who uses which service through this node, and who answers."""
        ...

    def has_drifted(self, *, is_current: bool = True) -> bool:
        """Whether somebody else may have changed something of ours since the last `converge`, which would mend it.

        What was lost altogether may be put again by this, but only where it `is_current`: where nothing has been heard
        that the datapath was not told of.
        """
        ...

    def check(self, wiring: EndpointConfig) -> list[str]:
        """What differs between the wiring and the kernel, in words; nothing when all is as it was made."""
        ...

    def survey(self) -> list[SpaceSurvey]:
        """What of ours is there, as it is found and not as it was told."""
        ...

    def reap(self) -> None:
        """Finish what `unplug` has left for later because it takes the kernel long."""
        ...

    def withdraw(self) -> list[str]:
        """Take everything of ours off the machine, workloads' ports included; what was done, in words.

        What others have there stays. Nothing but closing is done afterwards.
        """
        ...


def one_by_one(act: Callable[[PlugRequest], None], pluggings: Sequence[PlugRequest]) -> Iterator[WeftError | None]:
    """What a datapath that shares nothing answers to `plug_together`: each is acted upon when its answer is taken."""
    for each in pluggings:
        try:
            act(each)
        except WeftError as error:
            yield error
        else:
            yield None
