"""A pool of pre-provisioned ports, so that ADD does not wait for ovs-vswitchd (docs/adr/0013).

ovs-vswitchd walks all its ports whenever one is added, so adding takes longer the more there are. A node with many
ports therefore keeps some in reserve: up, without flows and without an endpoint. A port that is assigned to an endpoint
keeps its name in OVS. OVSDB knows the endpoint's interface name by `iface-id`, the kernel by an altname of the device.

ovs-vswitchd polls pool ports like all others, so a node with few ports has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from weft.adapters.netns.devices import PORT_PREFIX
from weft.adapters.ovs.ovsdb.bridge import POOL_KEY, SwitchBridge, SwitchPort
from weft.adapters.ovs.ports.devices import Devices
from weft.ports.datapath import EndpointConfig

# One pool port for so many ports in use.
PORTS_PER_POOL_PORT: Final = 16
MAX_POOL_SIZE: Final = 8


class PortPool:
    """The pool, as the local copy of OVSDB has it."""

    def __init__(self, bridge: SwitchBridge, devices: Devices, *, mtu: int) -> None:
        self._bridge = bridge
        self._devices = devices
        self._mtu = mtu
        self._taken: set[str] = set()

    @property
    def ready(self) -> list[SwitchPort]:
        """Ports that can be assigned now. ovs-vswitchd sends nothing to a device before it has seen it up."""
        ports = sorted(self._bridge.pool_ports().items())
        return [port for _, port in ports if port.ofport and port.is_up and self._is_usable(port)]

    def take(self, configs: Iterable[EndpointConfig]) -> dict[str, SwitchPort]:
        """Ports for endpoints, by interface name, as far as there are any. A port is handed out once."""
        names = (config.port.interface for config in configs if config.mtu == self._mtu)
        taken = dict(zip(names, self.ready, strict=False))
        self._taken |= {port.name for port in taken.values()}
        return taken

    def resize(self) -> set[str]:
        """Add missing ports, and mark surplus and unusable ones for deletion; the names of the latter.

        Does not wait for ovs-vswitchd: the next call sets up what it has created by then.
        """
        ports, in_use = self._bridge.pool_ports(), len(self._bridge.ports())
        self._taken &= ports.keys()
        usable = {name for name, port in ports.items() if self._is_usable(port)}
        self._devices.bring_up_pool_ports(name for name in usable if ports[name].ofport and not ports[name].is_up)
        surplus, size = ports.keys() - usable, min(in_use // PORTS_PER_POOL_PORT, MAX_POOL_SIZE)
        # Hysteresis: refill at half the size, shrink above twice the size, so that each ADD and DEL changes nothing.
        if len(usable) <= size // 2 < size:
            self._insert(size - len(usable))
        elif len(usable) > 2 * in_use // PORTS_PER_POOL_PORT:
            surplus |= {*sorted(usable)[size:]}
        self._devices.mark_named_for_reap(surplus)
        return surplus

    def _is_usable(self, port: SwitchPort) -> bool:
        """Whether it is as requested, and never handed out: if assigning it failed, its number may have flows."""
        has_mtu = port.external_ids[POOL_KEY] == str(self._mtu)
        has_ofport = port.assigned_ofport in {port.requested_ofport, 0}
        return has_mtu and has_ofport and port.name not in self._taken

    def _insert(self, count: int) -> None:
        reserved = self._bridge.reserve_ofport(map(str, range(count))).values()
        ofports = {pool_port_name(ofport): ofport for ofport in reserved}
        # An endpoint's device may have such a name, if its port was deleted and added again with another number.
        for name in self._devices.existing_names(ofports):
            del ofports[name]
        external_ids = {name: {POOL_KEY: str(self._mtu)} for name in ofports}
        self._bridge.insert_ports(external_ids, ofports, dict.fromkeys(external_ids, self._mtu))


def pool_port_name(ofport: int) -> str:
    """Names of other workload ports have no dash after the prefix."""
    return f"{PORT_PREFIX}-{ofport}"
