"""Ports and devices as they are found made what they should be: what nobody wants goes, what lacks a port gets one.

Ports that are made in advance stay as they are (`spares`), also those that the switch has not made yet.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.adapters.ovs.ovsdb.bridge import SwitchBridge
from weft.adapters.ovs.ovsdb.external_ids import NAMESPACE_MARK, told_owner
from weft.adapters.ovs.ports.devices import Devices, has_macvlan
from weft.kernel.netlink.link import Link


def fit_ports(
    bridge: SwitchBridge, devices: Devices, links: dict[str, Link], marks: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Every device that is there and has marks is a port with them, and no other of ours; what was done, in words.

    `links` are the devices that are there, of which those that go are taken out.
    """
    spares = {name for name, port in bridge.spares().items() if (name in links or not port.given) and not port.error}
    ports = {**bridge.ports(), **bridge.spares()}
    lonely = {
        name
        for name, port in ports.items()
        if name in links and devices.has_no_peer(links[name], port.marks.get(NAMESPACE_MARK, ""))
    }
    strange = [links.pop(name) for name in (links.keys() - marks.keys() - spares) | lonely]
    devices.retire(strange)
    devices.reap()
    useless = {name for name, port in ports.items() if name not in marks or name not in links or port.error} - spares
    bridge.drop(useless, wait=True)
    raised = devices.raise_all(link for name, link in links.items() if name not in spares)
    added = [name for name in marks.keys() & links.keys() if name not in ports or name in useless]
    bridge.add(
        {links[name].name: {**marks[name], **told_owner(links[name])} for name in added},
        {links[name].name: links[name].mtu for name in added if has_macvlan(links[name])},
    )
    return [
        *(f"removed device {link.name}" for link in strange),
        *(" ".join((f"removed port {name}", ports[name].error)).strip() for name in useless),
        *(f"raised device {name}" for name in raised),
        *(f"added port {name}" for name in added),
    ]
