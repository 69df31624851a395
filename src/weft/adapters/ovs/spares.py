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

from weft.adapters.linux.judging import PORT_PREFIX
from weft.adapters.ovs.bridge import SPARE_MARK, SwitchBridge, SwitchPort
from weft.adapters.ovs.devices import Devices
from weft.ports.datapath import Wiring

PORTS_FOR_ONE: Final = 16
"""So many ports are worth one to spare."""
MOST: Final = 8


class Spares:
    """See the module. It goes by the copy of the database as it is at the moment."""

    def __init__(self, bridge: SwitchBridge, devices: Devices, *, mtu: int) -> None:
        self._bridge = bridge
        self._devices = devices
        self._mtu = mtu
        self._raised: set[str] = set()
        self._ready: set[str] = set()
        self._taken: set[str] = set()

    def take(self, wirings: Iterable[Wiring]) -> dict[str, SwitchPort]:
        """Ports for workloads, by their host ends, as far as there are any; they are not handed out again."""
        there = self._bridge.spares()
        ready = iter([there[name] for name in sorted(self._ready & there.keys()) if there[name].number])
        fitting = (wiring.port.interface for wiring in wirings if wiring.mtu == self._mtu)
        taken = dict(zip(fitting, ready, strict=False))
        self._taken |= {port.name for port in taken.values()}
        self._ready -= self._taken
        return taken

    def tend(self) -> set[str]:
        """Have as many as this node should have; the names of the others, whose devices are as good as gone.

        Waits for nothing: what the switch has made by the next call is raised then, and by the one after it the switch
        has heard of it.
        """
        there = self._bridge.spares()
        self._taken &= there.keys()  # handing those over has failed, and their numbers may have flows
        useless = self._taken | {name for name, port in there.items() if not self._is_as_asked_for(port)}
        good = there.keys() - useless
        made = {name for name in good if there[name].number}
        self._ready = self._raised & made
        self._raised = self._ready | self._devices.raise_spares(made - self._raised)
        wanted = min(len(self._bridge.ports()) // PORTS_FOR_ONE, MOST)
        if len(good) <= wanted // 2 < wanted:
            self._ask_for(wanted - len(good))
        elif len(good) > 2 * wanted:
            useless |= {*sorted(good)[wanted:]}
        self._ready -= useless
        self._devices.retire_named(useless)
        return useless

    def _is_as_asked_for(self, port: SwitchPort) -> bool:
        return port.marks[SPARE_MARK] == str(self._mtu) and port.given in {port.asked, 0}

    def _ask_for(self, count: int) -> None:
        promised = self._bridge.promise(map(str, range(count))).values()
        numbers = {spare_name(number): number for number in promised}
        for name in self._devices.are_there(numbers):  # somebody's, whose port was lost and has another number now
            del numbers[name]
        marks = {name: {SPARE_MARK: str(self._mtu)} for name in numbers}
        self._bridge.ask_for(marks, numbers, dict.fromkeys(marks, self._mtu))


def spare_name(number: int) -> str:
    """No host end that has its own name from the beginning is called like this."""
    return f"{PORT_PREFIX}-{number}"
