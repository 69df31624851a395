"""Ports that are made in advance, so that a workload does not wait until the switch has gone over all that it has.

It does so for every port that it is told of, and the more there are the longer it takes. So a node with many ports has
some more that are nobody's: up, with no flows, and nobody on them. One that is handed over keeps its name in the switch
and is known by that of the host end which it has become: to the database by its marks, to the kernel as another name of
the device.

Each one is asked for packets as the others are, so a node with few ports has none to spare.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from weft.adapters.netns.nft.policy_chains import PORT_PREFIX
from weft.adapters.ovs.ovsdb.bridge import SPARE_MARK, SwitchBridge, SwitchPort
from weft.adapters.ovs.ports.devices import Devices
from weft.ports.datapath import EndpointConfig

# So many ports are worth one to spare.
PORTS_FOR_ONE: Final = 16
MOST: Final = 8


class PortPool:
    """See the module. It goes by the copy of the database as it is at the moment."""

    def __init__(self, bridge: SwitchBridge, devices: Devices, *, mtu: int) -> None:
        self._bridge = bridge
        self._devices = devices
        self._mtu = mtu
        self._taken: set[str] = set()

    @property
    def ready(self) -> list[SwitchPort]:
        """Those that a workload can have: the switch sends nothing to one of which it has not heard that it is up."""
        there = self._bridge.spares()
        return [port for name, port in sorted(there.items()) if port.number and port.is_up and self._is_good(port)]

    def take(self, wirings: Iterable[EndpointConfig]) -> dict[str, SwitchPort]:
        """Ports for workloads, by their host ends, as far as there are any; they are not handed out again."""
        fitting = (wiring.port.interface for wiring in wirings if wiring.mtu == self._mtu)
        taken = dict(zip(fitting, self.ready, strict=False))
        self._taken |= {port.name for port in taken.values()}
        return taken

    def tend(self) -> set[str]:
        """Have as many as this node should have; the names of the others, whose devices are as good as gone.

        Waits for nothing: what the switch has made by the next call is raised then.
        """
        there, ports = self._bridge.spares(), len(self._bridge.ports())
        self._taken &= there.keys()
        good = {name for name, port in there.items() if self._is_good(port)}
        self._devices.raise_spares(name for name in good if there[name].number and not there[name].is_up)
        useless, wanted = there.keys() - good, min(ports // PORTS_FOR_ONE, MOST)
        if len(good) <= wanted // 2 < wanted:
            self._ask_for(wanted - len(good))
        elif len(good) > 2 * ports // PORTS_FOR_ONE:  # twice as many as wanted, or one where none is by far
            useless |= {*sorted(good)[wanted:]}
        self._devices.retire_named(useless)
        return useless

    def _is_good(self, port: SwitchPort) -> bool:
        """Whether it is as it was asked for. When handing one over has failed its number may have flows."""
        as_asked = port.marks[SPARE_MARK] == str(self._mtu) and port.given in {port.asked, 0}
        return as_asked and port.name not in self._taken

    def _ask_for(self, count: int) -> None:
        promised = self._bridge.reserve_ofport(map(str, range(count))).values()
        numbers = {spare_name(number): number for number in promised}
        for name in self._devices.are_there(numbers):  # somebody's, whose port was lost and has another number now
            del numbers[name]
        marks = {name: {SPARE_MARK: str(self._mtu)} for name in numbers}
        self._bridge.ask_for(marks, numbers, dict.fromkeys(marks, self._mtu))


def spare_name(number: int) -> str:
    """No host end that has its own name from the beginning is called like this."""
    return f"{PORT_PREFIX}-{number}"
