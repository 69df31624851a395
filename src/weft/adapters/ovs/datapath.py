"""The Datapath on Open vSwitch, in its four modes (contiv 7.1): one bridge, a zone per tenant, flows as bundles.

Between nodes packets look as those of the linux datapath do: each overlay has a vxlan device of the kernel's, which is
an ordinary port of the bridge. Networks of VLAN tags leave by the uplinks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from weft.adapters.netns.diagnostics import probe_macvlan
from weft.adapters.netns.host.ruleset import HostSurroundings
from weft.adapters.netns.kernel_state import overlay_name
from weft.adapters.netns.tools import KernelTools
from weft.adapters.ovs.control.health import examine_switch
from weft.adapters.ovs.control.packet_in import drop_of
from weft.adapters.ovs.control.revalidation import settle
from weft.adapters.ovs.control.trace import trace
from weft.adapters.ovs.openflow.client import OpenFlow
from weft.adapters.ovs.ovsdb.bridge import NAME, TENANT_MARK, SwitchBridge, open_database
from weft.adapters.ovs.ovsdb.external_ids import leg_marks, overlay_marks, port_marks, wiring_marks
from weft.adapters.ovs.ovsdb.uplinks import Uplinks
from weft.adapters.ovs.pipeline.conntrack_flush import owned
from weft.adapters.ovs.pipeline.context import FlowContext
from weft.adapters.ovs.pipeline.flow_table import FlowTable
from weft.adapters.ovs.pipeline.pipeline import not_carried, without_uplinks
from weft.adapters.ovs.ports.devices import Devices, Way
from weft.adapters.ovs.ports.garp import spoofguard_entries
from weft.adapters.ovs.ports.isolation import GUARD, UNGUARD
from weft.adapters.ovs.ports.pool import PortPool
from weft.adapters.ovs.ports.reconcile import fit_ports
from weft.adapters.ovs.tenant_netns import Spaces
from weft.domain.addresses import Address, Subnet
from weft.domain.desired.diff import Difference, in_turn
from weft.domain.desired.state import Overlay, Port, StateItem, TenantNetns
from weft.domain.errors import DatapathFault, WeftError
from weft.domain.ids import TenantName
from weft.kernel.mtu import workload_mtu
from weft.kernel.netlink.link import Link
from weft.kernel.netlink.socket import ROUTE, NetlinkSocket
from weft.kernel.netns import Namespace
from weft.kernel.nftables import open_nftables
from weft.ports.datapath import (
    NO_CHANGE,
    DriftReport,
    Drop,
    EndpointConfig,
    Finding,
    PlugRequest,
    Question,
    ServiceFlowStats,
    SpaceSurvey,
    VerdictCounters,
)

_NEVER = (0, 0)
# How often the switch is asked how many flows of ours it has: nobody tells when others take some away.
_COUNT_S = 1.0


class _Met(NamedTuple):
    """How often the daemons were connected to, the ports that there are, and whether uplinks are not as they were."""

    connections: tuple[int, int]
    numbers: Mapping[str, int]
    is_disturbed: bool


class OvsDatapath(KernelTools):
    """See `weft.ports.datapath`. `switch` is the directory of Open vSwitch's sockets; `vtep` is our end of tunnels.

    Tenants' spaces are pinned in `directory`. `uplinks` are the interfaces that carry networks of VLAN tags.
    """

    def __init__(
        self,
        *,
        switch: Path,
        directory: Path,
        vtep: Address,
        vxlan_port: int,
        uplinks: Sequence[str] = (),
        unmasked: Sequence[Subnet] = (),
        node_port_subnets: Sequence[Subnet] = (),
    ) -> None:
        self._directory = directory
        self._surroundings = HostSurroundings(vtep, vxlan_port, (*unmasked,), (*node_port_subnets,))
        self._vtep = vtep
        self._vxlan_port = vxlan_port
        self._switch = switch
        self._database = open_database(switch)
        self._bridge = SwitchBridge(self._database)
        self._uplinks = Uplinks(uplinks, switch=switch, database=self._database, ours=self._bridge)
        self._openflow = OpenFlow(f"unix:{switch / NAME}.mgmt")
        self._flows = FlowTable(self._openflow)
        self._leaving: set[str] = set()
        self._connections = _NEVER
        self._numbers: Mapping[str, int] = {}
        self._count_at = 0.0
        self._faults: list[str] = []
        # What was done beside rounds, in words, for the next one to tell.
        self._mended: list[str] = []
        self._met: _Met | None = _Met(_NEVER, {}, is_disturbed=False)

    def __enter__(self) -> Self:
        self._namespace = Namespace.current()
        self._netlink = NetlinkSocket(ROUTE, namespace=self._namespace)
        self._nftables = open_nftables(self._namespace)
        self._mtu = workload_mtu(self._netlink, self._vtep)
        self._devices = Devices(self._namespace, self._netlink, vtep=self._vtep, port=self._vxlan_port, mtu=self._mtu)
        self._spaces = Spaces(
            self._directory, self._namespace, self._netlink, mtu=self._mtu, surroundings=self._surroundings
        )
        self._spares = PortPool(self._bridge, self._devices, mtu=self._mtu)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spaces.close()
        self._openflow.close()
        self._uplinks.close()
        self._database.close()
        self._nftables.close()
        self._devices.close()
        self._netlink.close()
        self._namespace.close()

    @property
    def mtu(self) -> int:
        return self._mtu

    def _prepare(self) -> list[str]:
        """The bridge is there, and nobody else hears its ports; what was done, in words."""
        repaired = self._bridge.prepare()
        self._nftables.run(GUARD)
        repaired += self._prepare_uplinks()
        self._connections = self._count_connections()
        return repaired

    def _prepare_uplinks(self) -> list[str]:
        """The rest of the node goes on without them, and says so."""
        self._faults = []
        try:
            return self._uplinks.converge(self._netlink)
        except DatapathFault as error:
            self._faults = [error.message]
            return []

    def converge(self, wanted: Set[StateItem]) -> DriftReport:
        self._flows.expect(wanted)
        repaired = [*self._mended, *self._bridge.prepare(), *self._refill(wanted), *self._prepare()]
        tenants = {part.tenant for part in wanted if isinstance(part, TenantNetns)}
        self._bridge.number(tenants)
        repaired += self._make_spaces(tenants)
        done, links = self._converge_ports(wanted)
        repaired += done
        repaired += self._devices.converge_ways((part for part in wanted if isinstance(part, Way)), links)
        repaired += self._spaces.converge(wanted)
        repaired += self._flows.converge(wanted, self._ground())
        self._uplinks.announce(spoofguard_entries(wanted, self._vtep))
        self._forget(self._bridge.tenants().keys() - tenants)
        self._connections, self._numbers = self._count_connections(), self._read_numbers()
        self._mended = []
        _refuse([*not_carried(wanted), *self._faults])
        missing = {part for part in wanted if isinstance(part, Port) and part.interface not in self._numbers}
        return DriftReport(repaired=tuple(repaired), missing=frozenset(missing))

    def _refill(self, wanted: Set[StateItem]) -> list[str]:
        """A switch that was started anew forwards again at once: it asks for the same numbers for its ports.

        Reading back all else takes longer than it took to start. What it was given when it came back may be of before.
        """
        if self._flows.are_gone():
            return self._flows.fill(wanted, self._ground())
        return self._flows.converge(wanted, self._ground()) if self._mended else []

    def _converge_ports(self, wanted: Set[StateItem]) -> tuple[list[str], dict[str, Link]]:
        """Every wanted device that is there is a port, and no other of ours; what was done, and the devices."""
        repaired: list[str] = []
        marks = {part.interface: port_marks(part) for part in wanted if isinstance(part, Port)}
        overlays = [part for part in wanted if isinstance(part, Overlay)]
        marks |= leg_marks(self._bridge.numbers_of({part.tenant for part in wanted if isinstance(part, TenantNetns)}))
        links = self._devices.read()
        for overlay in overlays:
            marks[overlay_name(overlay.vni)] = overlay_marks(overlay)
            if overlay_name(overlay.vni) not in links:
                repaired.append(f"made device {self._devices.put_overlay(overlay)}")
        if repaired:
            links = self._devices.read()
        repaired += fit_ports(self._bridge, self._devices, links, marks)
        self._leaving.clear()
        return repaired, links

    def apply(self, difference: Difference[StateItem]) -> None:
        with self._flows.telling():
            self._apply(difference)

    def _apply(self, difference: Difference[StateItem]) -> None:
        if self._connections == _NEVER:
            self._prepare()
        come = {part.tenant for part in difference.put if isinstance(part, TenantNetns)}
        self._bridge.number(come)
        self._make_spaces(come)
        self._add_overlays(part for part in difference.put if isinstance(part, Overlay))
        drop, put = _unplugged(difference.drop), _unplugged(difference.put)
        self._flows.change(drop=drop, put=put, ground=self._ground())
        self._spaces.change(drop=drop, put=put)
        self._devices.change_ways(
            drop=[part for part in drop if isinstance(part, Way)], put=[part for part in put if isinstance(part, Way)]
        )
        left = {part.tenant for part in drop if isinstance(part, TenantNetns)} - come
        gone = {overlay_name(part.vni) for part in drop if isinstance(part, Overlay)}
        gone -= {overlay_name(part.vni) for part in put if isinstance(part, Overlay)}
        gone |= leg_marks(self._bridge.numbers_of(left)).keys()
        if gone:
            self._devices.retire(link for name, link in self._devices.read().items() if name in gone)
            self._devices.reap()
            self._bridge.drop(gone)
        self._spaces.drop(left)
        self._forget(left)
        self._numbers = self._read_numbers()
        _refuse(not_carried(difference.put))

    def settle(self) -> None:
        settle(self._switch, trigger_revalidation=self._flows.rewrite_flow)

    def _make_spaces(self, tenants: Set[TenantName]) -> list[str]:
        """Tenants, which have numbers, have a space with legs; what was made, in words."""
        incomplete = self._spaces.incomplete(self._bridge.numbers_of(tenants))
        marks = leg_marks(incomplete)
        self._bridge.drop(marks.keys(), wait=True)
        self._spaces.clear(incomplete)
        self._bridge.add(marks, dict.fromkeys(marks, self._mtu))
        made = self._spaces.make(incomplete)
        if incomplete:
            self._openflow.await_turn()  # it is to hear that they are up
        return made

    def _add_overlays(self, overlays: Iterable[Overlay]) -> None:
        known = self._bridge.ports()
        marks = {self._devices.put_overlay(part): overlay_marks(part) for part in overlays}
        self._bridge.add({name: own for name, own in marks.items() if name not in known})

    def plug(self, wiring: EndpointConfig, policy: Difference[StateItem] = NO_CHANGE) -> None:
        for fault in self.plug_together([PlugRequest(wiring, policy)]):
            if fault is not None:
                raise fault

    def plug_together(self, pluggings: Sequence[PlugRequest]) -> Iterator[WeftError | None]:
        """The switch takes as long for many ports as for one: they share a bundle, a transaction and a wait.

        It looks at all its ports whenever it is told of one and whenever a device changes, and does nothing else
        meanwhile. So flows come first, for the numbers that ports will have; then the ports, whose devices it makes
        itself; and what tenants' spaces are told while it is at it. Nothing passes before workloads are joined to them.
        """
        faults: dict[str, WeftError] = {}
        for each in pluggings:
            with _noted(faults, each.wiring.port.interface):
                self._find_room(each)
        coming = [each for each in pluggings if each.wiring.port.interface not in faults]
        try:
            if coming:
                with self._flows.telling():
                    self._add_ports(coming, faults)
        except DatapathFault as error:
            faults |= {each.wiring.port.interface: error for each in coming}
        yield from (faults.get(each.wiring.port.interface) for each in pluggings)

    def _find_room(self, plugging: PlugRequest) -> None:
        """Refuse what cannot be had."""
        wiring = plugging.wiring
        _refuse(not_carried(plugging.policy.put))
        if wiring.port.interface in self._leaving:
            self._let_go()
            self._bridge.drop({wiring.port.interface}, wait=True)  # its name is to be free
        self._devices.refuse_taken(wiring)

    def _add_ports(self, pluggings: Sequence[PlugRequest], faults: dict[str, WeftError]) -> None:
        """Flows, ports and devices of workloads for which there is room."""
        self._bridge.database.look_alive()
        wirings = {each.wiring.port.interface: each.wiring for each in pluggings}
        spares = self._spares.take(wirings.values())
        new = {name: wiring for name, wiring in wirings.items() if name not in spares}
        numbers = {name: port.number for name, port in spares.items()} | self._bridge.reserve_ofport(new)
        self._admit(pluggings, self._ground(numbers))
        rows = self._bridge.ask_for(
            {name: wiring_marks(wiring) for name, wiring in new.items()},
            numbers,
            {name: wiring.mtu for name, wiring in new.items()},
        )
        policy = in_turn(each.policy for each in pluggings)
        with self._bridge.assign_pool_port({port.name: wiring_marks(wirings[name]) for name, port in spares.items()}):
            self._spaces.change(drop=policy.drop, put=(*policy.put, *(each.wiring.port for each in pluggings)))
        self._devices.raise_made(new.values())
        with self._openflow.turning() if new else nullcontext():  # it hears that they are up, however late they were
            refused = self._bridge.wait_for(rows, numbers)
            faults |= {name: DatapathFault(reason) for name, reason in refused.items()}
            gone = DatapathFault("the port was taken away as soon as it was asked for")
            faults |= dict.fromkeys(spares.keys() - self._bridge.ports().keys(), gone)
            are_up = True
            for name, wiring in wirings.items():
                if name not in faults:
                    with _noted(faults, name):
                        are_up &= self._devices.plug(wiring, spare=spares[name].name if name in spares else "")
        if not are_up:
            self._openflow.await_turn()
        come = [each for each in pluggings if each.wiring.port.interface not in faults]
        self._uplinks.send_garp(spoofguard_entries((each.wiring.port for each in come), self._vtep))
        self._numbers = self._read_numbers()
        places = [(each, each.wiring.port.interface) for each in come]
        if misplaced := [each for each, name in places if self._numbers.get(name) != numbers[name]]:
            self._admit(misplaced, self._ground())  # somebody else was given the number in between

    def _admit(self, pluggings: Sequence[PlugRequest], ground: FlowContext) -> None:
        """Workloads speak and are spoken to at their ports, each with its policy in force.

        Whoever was at their addresses before, and wherever, they inherit no connection.
        """
        policy = in_turn(each.policy for each in pluggings)
        ports = [each.wiring.port for each in pluggings]
        new = owned(port for port in ports if port not in self._flows.parts)
        put = (*policy.put, *ports)
        self._flows.change(drop=(*policy.drop, *put), put=put, ground=ground, new=new)

    def unplug(self, wiring: EndpointConfig, policy: Difference[StateItem] = NO_CHANGE) -> None:
        self._devices.unplug(wiring)
        self._leaving.add(wiring.port.interface)
        self._numbers = {name: each for name, each in self._numbers.items() if name != wiring.port.interface}
        drop, left = (*policy.drop, wiring.port), owned([wiring.port])
        with self._flows.telling():
            self._flows.change(drop=drop, put=policy.put, ground=self._ground(), new=left)
            self._spaces.change(drop=policy.drop, put=policy.put)
        self._spaces.dismiss(wiring.port)

    def check(self, wiring: EndpointConfig) -> list[str]:
        self._database.look_alive()
        port = self._bridge.ports().get(wiring.port.interface)
        found = self._devices.differences(wiring)
        if port is None or not port.number:
            found.append(f"{wiring.port.interface} is not a port of {NAME}")
        return found + [f"flow {flow} is missing" for flow in self._flows.lacks(wiring.port)]

    def drops(self) -> list[Drop]:
        tenants = {number: tenant for tenant, number in self._bridge.tenants().items()}
        ports = {port.number: port for port in self._bridge.ports().values() if port.number}
        told = (drop_of(each, tenants, ports) for each in self._openflow.take_told())
        return [drop for drop in told if drop is not None]

    def trace(self, question: Question) -> str | Drop:
        parts = self._flows.parts
        return trace(self._switch, question, self._bridge.ports(), trunk=self._uplinks.trunk, parts=parts)

    def counters(self) -> list[VerdictCounters]:
        return self._flows.counters(self._bridge.tenants())

    def service_uses(self) -> list[ServiceFlowStats]:
        return self._spaces.uses()

    def has_drifted(self, *, is_current: bool = True) -> bool:
        """See `weft.ports.datapath`. A daemon that is away is told of once, and once more when it is back."""
        before, self._met = self._met, self._look(is_current=is_current)
        if self._met == _Met(self._connections, self._numbers, is_disturbed=False):
            return self._spaces.is_disturbed() or self._has_other_flows()
        return self._met != before

    def _look(self, *, is_current: bool) -> _Met | None:
        """What there is at the moment; None while a daemon is away."""
        try:
            self._database.look()
            self._mended += self._flows.look(is_current=is_current)
            self._uplinks.look()
        except DatapathFault:
            return None
        return _Met(self._count_connections(), self._read_numbers(), self._uplinks.is_disturbed())

    def _has_other_flows(self) -> bool:
        if time.monotonic() < self._count_at:
            return False
        self._count_at = time.monotonic() + _COUNT_S
        try:
            return self._flows.is_disturbed() or self._uplinks.lacks_flows()
        except DatapathFault:
            return True

    def survey(self) -> list[SpaceSurvey]:
        ports, links = self._bridge.ports(), self._devices.read()
        amiss = [f"{name}: {port.error}" for name, port in ports.items() if port.error]
        amiss += [] if self._uplinks.trunk else without_uplinks(self._flows.parts)
        return [
            SpaceSurvey(
                tenant=tenant,
                ports=tuple(sorted(name for name, port in ports.items() if port.marks.get(TENANT_MARK) == tenant)),
                devices=tuple(sorted(links)),
                faults=tuple(amiss),
            )
            for tenant in sorted(self._bridge.tenants())
        ]

    @staticmethod
    def probe() -> list[str]:
        """See `weft.ports.datapath.DatapathTools`."""
        return [*KernelTools.probe(), *probe_macvlan()]

    @staticmethod
    def examine(switch: Path) -> Iterator[Finding]:
        """See `weft.ports.datapath.DatapathTools`."""
        return examine_switch(switch)

    @staticmethod
    def enter_host_ends(directory: Path, tenant: TenantName) -> None:
        """See `weft.ports.datapath.DatapathTools`: those of all tenants are in the machine's own namespace."""

    def reap(self) -> None:
        """See `weft.ports.datapath`. Devices go in one go, and before their ports.

        One by one the switch would wait for the kernel to delete them, and forward nothing meanwhile.
        """
        self._let_go()
        self._spaces.reap()
        self._leaving |= self._spares.tend()

    def _let_go(self) -> None:
        if self._leaving:
            self._devices.reap()
            self._bridge.drop(self._leaving)
            self._leaving.clear()

    def withdraw(self) -> list[str]:
        """See `weft.ports.datapath`. Devices go before their ports, as in `reap`."""
        self._database.look_alive()
        repaired = self._uplinks.remove()
        links = self._devices.read()
        self._devices.retire(links.values())
        self._devices.reap()
        self._bridge.drop({*self._bridge.ports(), *self._bridge.spares()}, wait=True)
        repaired += self._spaces.converge(frozenset())
        repaired += [f"removed device {name}" for name in links]
        repaired += self._bridge.remove(self._openflow)
        self._nftables.run(UNGUARD)
        return repaired

    def _forget(self, tenants: Iterable[TenantName]) -> None:
        """Free the numbers of tenants, and the connections with them: whoever gets a number next inherits none."""
        known = self._bridge.tenants()
        gone = [tenant for tenant in tenants if tenant in known]
        self._openflow.forget_zones(known[tenant] for tenant in gone)
        self._bridge.forget(gone)
        self._flows.forget({*gone})

    def _ground(self, promised: Mapping[str, int] | None = None) -> FlowContext:
        ports = self._bridge.numbers()
        return FlowContext(
            tenants=self._bridge.tenants(),
            ports={**ports, **promised} if promised else ports,
            vtep=self._vtep,
            trunk=self._uplinks.trunk,
        )

    def _read_numbers(self) -> Mapping[str, int]:
        """Of ports that do not leave."""
        numbers = self._bridge.numbers()
        if self._leaving.isdisjoint(numbers):
            return numbers
        return {name: number for name, number in numbers.items() if name not in self._leaving}

    def _count_connections(self) -> tuple[int, int]:
        return self._database.connections, self._openflow.connections + self._uplinks.connections


def _unplugged(parts: Iterable[StateItem]) -> list[StateItem]:
    """All but ports, which come and go by plugging."""
    return [part for part in parts if not isinstance(part, Port)]


@contextmanager
def _noted(faults: dict[str, WeftError], interface: str) -> Iterator[None]:
    """What goes wrong in the block concerns the workload of this host end alone."""
    try:
        yield
    except WeftError as error:
        faults[interface] = error


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise DatapathFault("; ".join(faults))
