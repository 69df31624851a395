"""Reconcile OVS ports with kernel devices, and isolate the devices from the host's network stack.

With the userspace datapath ovs-vswitchd reads packets of kernel devices with a raw socket, and the host's stack
receives a copy: it would answer ARP for its own addresses, accept packets, and forward others past the switch. An
nftables table drops what comes from our devices, by name. With the kernel datapath no packet reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.adapters.netns.devices import NETNS_PORT_PREFIX, OVERLAY_PREFIX, PORT_PREFIX
from weft.adapters.ovs.ovsdb.bridge import SwitchBridge
from weft.adapters.ovs.ovsdb.external_ids import NETNS_KEY, owner_from_alias
from weft.adapters.ovs.ports.devices import Devices, is_internal_port
from weft.kernel.netlink.link import Link

_TABLE = "weft_ovs"
_DEVICE_PREFIXES = PORT_PREFIX, OVERLAY_PREFIX, NETNS_PORT_PREFIX
# The first hook of each nftables family. ARP has no prerouting.
_HOOKS = {"inet": "prerouting", "arp": "input"}


def _isolation_commands(family: str, hook: str) -> list[str]:
    chain = f"{family} {_TABLE} host_isolation"
    return [
        f"add table {family} {_TABLE}",
        # Before conntrack (-200) and raw (-300), so that dropped packets leave no trace in the host.
        f"add chain {chain} {{ type filter hook {hook} priority -400; }}",
        # The chain may exist already, so that adding rules alone would double them.
        f"flush chain {chain}",
        *(f'add rule {chain} iifname "{prefix}*" drop' for prefix in _DEVICE_PREFIXES),
    ]


# nftables commands that create the tables, or replace their rules.
ISOLATION_RULES = (
    "\n".join(line for family, hook in _HOOKS.items() for line in _isolation_commands(family, hook)) + "\n"
)

# Commands that delete them. `delete` fails for a missing table, so it is added first.
ISOLATION_CLEANUP = "".join(f"add table {family} {_TABLE}\ndelete table {family} {_TABLE}\n" for family in _HOOKS)


def reconcile_ports(
    bridge: SwitchBridge,
    devices: Devices,
    links: dict[str, Link],
    desired: Mapping[str, Mapping[str, str]],
    *,
    keep_unknown: bool = False,
) -> list[str]:
    """Make exactly the existing devices of `desired` ports, with these `external_ids`; a log of the changes.

    Removes other ports and devices of ours. `links` are the existing devices; those that are deleted are removed from
    it. Ports of the pool stay, also those that ovs-vswitchd has not created yet. With `keep_unknown` those of workloads
    stay too.
    """
    pool_ports = {
        name
        for name, port in bridge.pool_ports().items()
        if (name in links or not port.assigned_ofport) and not port.error
    }
    ports = {**bridge.ports(), **bridge.pool_ports()}
    if keep_unknown:
        # They have no flows: treated like ports of the pool, they stay and forward nothing.
        pool_ports |= {name for name in links if name.startswith(PORT_PREFIX) and name not in desired}
    without_peer = {
        name
        for name, port in ports.items()
        if name in links and devices.has_no_peer(links[name], port.external_ids.get(NETNS_KEY, ""))
    }
    deleted = [links.pop(name) for name in (links.keys() - desired.keys() - pool_ports) | without_peer]
    # Devices go before their ports: else ovs-vswitchd would delete them one by one, and forward nothing meanwhile.
    devices.mark_for_reap(deleted)
    devices.reap()
    stale = {name for name, port in ports.items() if name not in desired or name not in links or port.error}
    stale -= pool_ports
    bridge.remove_ports(stale, wait=True)
    set_up = devices.set_links_up(link for name, link in links.items() if name not in pool_ports)
    added = [name for name in desired.keys() & links.keys() if name not in ports or name in stale]
    bridge.add_ports(
        {links[name].name: {**desired[name], **owner_from_alias(links[name])} for name in added},
        {links[name].name: links[name].mtu for name in added if is_internal_port(links[name])},
    )
    return [
        *(f"removed device {link.name}" for link in deleted),
        *(" ".join((f"removed port {name}", ports[name].error)).strip() for name in stale),
        *(f"set device {name} up" for name in set_up),
        *(f"added port {name}" for name in added),
    ]
