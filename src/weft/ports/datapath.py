"""The Datapath port: what programs packet forwarding on a node from desired-state items (`weft.domain.desired.state`).

Contract for every adapter:

- Calls block. The agent makes all of them from one dedicated thread. Every call ends in bounded time.
- Each call names an end state; "already so" is success. A failure raises `DatapathFault` and may leave the change half
  applied: the caller may repeat the call, and `converge` repairs what is left.
- `converge` needs no memory of earlier calls. It finds every object of ours and touches no object of others.
- Install before forwarding: both ends of a port are configured first; then its spoof guard and its policy are installed
  in one transaction. Before that the port forwards nothing.
- Policy items (`weft.domain.policy.policymap.policy_state`) of one call are installed atomically: no packet is
  evaluated against half of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Protocol

import msgspec

from weft.domain.addresses import Address
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import NO_LIMITS, Port, RateLimits, StateItem
from weft.domain.errors import DatapathFault, WeftError
from weft.domain.host_access.view import PublishedPort
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import FrontendKey

# IANA protocol numbers.
_ICMP, _ICMPV6 = 1, 58
NO_CHANGE: Difference[StateItem] = Difference((), ())


class InterfaceAddress(msgspec.Struct, frozen=True):
    """An address of a workload's interface. Without a gateway the default route points at the node itself."""

    address: Address
    length: int
    gateway: Address | None = None


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one attachment: host port, pod interface, addresses and routes."""

    port: Port
    # Path of the workload's network namespace.
    netns: str
    # The interface's name in that namespace.
    interface: str
    addresses: tuple[InterfaceAddress, ...]
    mtu: int
    # IFLA_ALT_IFNAME: the full network name where it does not fit into the kernel's 15 characters.
    alt_ifname: str = ""
    # False for an additional interface: it gets routes to its own subnets only, the first interface keeps the default.
    default_route: bool = True
    # Whether the first interface is in the same subnets: then a source-based rule selects this interface.
    shares_subnets: bool = False
    # Host ports that are DNATed to it (the CNI portMappings capability).
    ports: tuple[PublishedPort, ...] = ()
    # Rate limits of the CNI bandwidth capability; they apply beside those of the group's netprofile.
    rates: RateLimits = NO_LIMITS
    # The endpoint's id; written to the device's ifalias or external_ids for operators.
    endpoint: str = ""
    # The pod's UID, or the container id where there is no pod. A sandbox of another UID never inherits the port.
    workload: str = ""


class PlugRequest(msgspec.Struct, frozen=True):
    """A workload to plug, and the desired-state changes to install in the same transaction as its port."""

    config: EndpointConfig
    changes: Difference[StateItem] = NO_CHANGE


class DriftReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `converge`: a description of each repair, and the desired ports that are not plugged."""

    # Texts, because they go to logs and events only; decisions follow from `missing`.
    repaired: tuple[str, ...] = ()
    missing: frozenset[Port] = frozenset()


class Drop(msgspec.Struct, frozen=True, kw_only=True):
    """A dropped packet. `verdict_id` is the verdict id of a policy entry, or 0 with a built-in drop `reason`.

    The tenant is empty for what the node itself drops, before a packet belongs to a tenant.
    """

    tenant: TenantName
    verdict_id: int
    reason: str
    source: Address
    target: Address
    protocol: int
    # 0 for protocols without ports.
    source_port: int = 0
    target_port: int = 0
    # Empty where the datapath does not know it.
    in_iface: str = ""
    out_iface: str = ""
    # Seconds since the epoch, by the clock of this machine.
    at: float = 0.0


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The first packet of a hypothetical connection that a workload of this node opens."""

    port: Port
    source: Address
    target: Address
    protocol: int
    target_port: int = 0

    @property
    def is_echo(self) -> bool:
        """Whether the packet is an ICMP or ICMPv6 echo request."""
        return self.protocol == (_ICMP if self.source.family == 4 else _ICMPV6)


# An exception, because most callers want all drops or none; those that can use a part catch it.
class PartialResult(DatapathFault):
    """The drop log of some tenant namespaces could not be read; `drops` holds those of the others."""

    def __init__(self, message: str, drops: list[Drop]) -> None:
        super().__init__(message)
        self.drops = drops


class VerdictCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Packets by policy verdict, and dropped packets by built-in reason, of one tenant.

    The tenant is empty for what the node itself drops, before a packet belongs to a tenant.
    An established connection skips evaluation until policy changes, so it counts once for each evaluation.
    """

    tenant: TenantName
    verdicts: dict[int, int]
    reasons: dict[str, int]


class ServiceFlowStats(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of one client to one backend of a service, from the datapath's counters."""

    tenant: TenantName
    client: Address
    frontend: FrontendKey
    provider: Address
    packets_in: int
    bytes_in: int
    packets_out: int
    bytes_out: int


class TenantNetnsReport(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's network namespace as read from the kernel: workload ports, other devices, and inconsistencies."""

    tenant: TenantName
    ports: tuple[str, ...]
    devices: tuple[str, ...]
    faults: tuple[str, ...] = ()


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check of the machine."""

    name: str
    text: str
    # What the operator should do; empty if the check passed.
    remedy: str = ""
    # Whether the datapath cannot work until the remedy is applied.
    is_fatal: bool = True


class DatapathTools(Protocol):
    """Operator tools of a datapath (`weft doctor`, `weft shell`); they work without a running agent."""

    def probe(self) -> list[str]:
        """Describe each kernel feature that this machine lacks. Leaves nothing behind."""
        ...

    def find_conflicts(self) -> list[str]:
        """Describe foreign firewall rules on this machine that may drop our packets."""
        ...

    def check_switch(self, switch: Path) -> Iterator[CheckResult]:
        """Check the Open vSwitch whose sockets are in the directory; yields nothing for a datapath without a switch."""
        ...

    # setns() affects the calling thread only; the thread must not be reused afterwards.
    def enter_tenant_netns(self, directory: Path, tenant: TenantName) -> None:
        """Move the calling thread into a tenant's netns permanently; `NotFound` when the node has none for it."""
        ...

    def enter_host_side_netns(self, directory: Path, tenant: TenantName) -> None:
        """Move the calling thread into the netns of a tenant's host-side ports: the tenant's, or the host's."""
        ...

    def enter_pod_netns(self, netns: Path) -> None:
        """Move the calling thread into a workload's netns permanently; `NotFound` when it does not exist."""
        ...

    def remove_netns_dir(self, directory: Path) -> None:
        """Remove the directory of the tenants' netns mounts; `DatapathFault` while one is mounted."""
        ...


class Datapath(Protocol):
    """See the module's contract."""

    @property
    def mtu(self) -> int:
        """The MTU of workload interfaces: the underlay's less the encapsulation."""
        ...

    def converge(self, desired: Set[StateItem], *, keep_unknown: bool = False) -> DriftReport:
        """Read our objects and make them equal to the desired state. Reports missing ports; it cannot plug them.

        With `keep_unknown` the devices of ports that are not desired stay, and so do the netns of all tenants: the
        records are incomplete, so they may be those of running workloads. They forward nothing.
        """
        ...

    def apply(self, difference: Difference[StateItem]) -> None:
        """Install and remove state items incrementally. Ports are added and removed by `plug` and `unplug`."""
        ...

    def flush_datapath_cache(self) -> None:
        """Return when all earlier changes apply to every packet, including those of established connections.

        Open vSwitch caches the actions of earlier packets (megaflows) until its revalidators have run.
        """
        ...

    def plug(self, config: EndpointConfig, changes: Difference[StateItem] = NO_CHANGE) -> None:
        """Plug a workload into its tenant's netns, which must exist; install the changes (policy, QoS) with its port.

        `Conflict` when the interface name is taken, `NotFound` when the pod's netns does not exist; nothing has changed
        then.
        """
        ...

    # An iterator, so that an ADD is answered as soon as its own result is known.
    def plug_batch(self, requests: Sequence[PlugRequest]) -> Iterator[WeftError | None]:
        """Plug workloads in order with shared transactions; yields, for each, its error or None.

        Nothing starts before the first result is consumed, and all is done when the last one is.
        """
        ...

    def unplug(self, config: EndpointConfig, changes: Difference[StateItem] = NO_CHANGE) -> None:
        """Unplug a workload: frees its interface name and removes its forwarding entries.

        Flushes its conntrack entries, so that the next holder of its addresses inherits no connection.
        """
        ...

    def drops(self) -> list[Drop]:
        """The packets dropped since the last call, oldest first; rate-limited by the kernel.

        `PartialResult` when the drop log of some tenants cannot be read.
        """
        ...

    def trace(self, request: TraceRequest) -> str | Drop:
        """Simulate a packet: its output device, or the drop. Sends nothing.

        `Unavailable` for a datapath without a tracer: there only a real packet shows it.
        """
        ...

    def counters(self) -> list[VerdictCounters]:
        """The verdict and drop counters of each tenant."""
        ...

    def service_flows(self) -> list[ServiceFlowStats]:
        """Traffic statistics of the service connections through this node."""
        ...

    def has_drifted(self, *, in_sync: bool = True) -> bool:
        """Whether our state may have been changed from outside since the last `converge`, so that it must run again.

        A restarted switch may be refilled by this call, but only when `in_sync`: when the desired state has no change
        that this datapath has not applied. Otherwise it could replay flows that are removed by now.
        """
        ...

    def check(self, config: EndpointConfig) -> list[str]:
        """Describe the differences between the configuration and the kernel (CNI CHECK); empty if there are none."""
        ...

    def inspect(self) -> list[TenantNetnsReport]:
        """Read each tenant's netns from the kernel, not from memory."""
        ...

    # Separate from `unplug`, so that DEL does not wait for an RCU grace period of the kernel.
    def reap(self) -> None:
        """Finish deferred work of `unplug`, such as device deletion, which takes the kernel long."""
        ...

    def uninstall(self) -> list[str]:
        """Remove all objects of ours from the machine, workload ports included; describes what was removed.

        Objects of others stay. The only call allowed afterwards is closing.
        """
        ...


def one_by_one(act: Callable[[PlugRequest], None], requests: Sequence[PlugRequest]) -> Iterator[WeftError | None]:
    """`plug_batch` without shared transactions: acts on each request when its result is consumed."""
    for request in requests:
        try:
            act(request)
        except WeftError as error:
            yield error
        else:
            yield None
