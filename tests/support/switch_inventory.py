"""The state of a host's Open vSwitch, read with `ovs-vsctl` and `ovs-ofctl` instead of our own code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from weft.lab.servers.openvswitch import Switch

BRIDGE, VLAN_BRIDGE = "contivVxlanBridge", "contivVlanBridge"

_TENANT = re.compile(r'"?weft-tenant-([^"=]+)"?="?(\d+)"?')
_REGISTER = re.compile(r"reg0=0x([0-9a-f]+)\b")
_WRITTEN = re.compile(r"set_field:0x([0-9a-f]+)->reg0\b")
_TARGET = re.compile(r"\b(?:nw_dst|ipv6_dst)=([^,/ ]+)")
_SOURCE = re.compile(r"\b(?:nw_src|ipv6_src)=([^,/ ]+)")
_METERED = re.compile(r"\b(in_port=|reg4=0x)([0-9a-f]+)\b.*actions=meter:(\d+)")
_METER = re.compile(r"meter=(\d+) kbps.*\n *\d*:?.*rate=(\d+)")
_METER_COUNT = re.compile(r"meter:(\d+) .*?byte_in_count:(\d+)")


class RateLimit(NamedTuple):
    """A rate limit in bits per second, and the bytes that have passed it."""

    rate: int
    passed: int


def tenants(switch: Switch) -> dict[int, str]:
    """Tenants by their node-local IDs."""
    if BRIDGE not in switch.configure("list-br", wait=False).split():
        return {}
    external_ids = switch.configure("get", "bridge", BRIDGE, "external_ids", wait=False)
    return {int(number): tenant for tenant, number in _TENANT.findall(external_ids)}


def ports(switch: Switch) -> set[str]:
    """The ports of the bridge, without its local port."""
    if BRIDGE not in switch.configure("list-br", wait=False).split():
        return set()
    return set(switch.configure("list-ports", BRIDGE, wait=False).split())


def uplinks(switch: Switch) -> set[str]:
    """The interfaces of the uplink port."""
    return set(switch.configure("list-ifaces", VLAN_BRIDGE, wait=False).split()) - {"weft-vlan-up"}


def reachable(switch: Switch) -> Iterator[tuple[str, str]]:
    """Tenant and address of each local workload that has a forwarding flow."""
    names = tenants(switch)
    for flow in switch.dump_flows(BRIDGE):
        found, number = _TARGET.search(flow), _REGISTER.search(flow)
        if found and number and "->reg4" in flow and "set_field:0x1->reg6" in flow:
            yield names[int(number[1], 16)], found[1]


def spoofguard_sources(switch: Switch) -> Iterator[tuple[str, str]]:
    """Tenant and address of each anti-spoofing entry, once per port."""
    names = tenants(switch)
    for flow in switch.dump_flows(BRIDGE):
        found, number = _SOURCE.search(flow), _WRITTEN.search(flow)
        if found and number and "in_port=" in flow and "goto_table" in flow and "icmp_type" not in flow:
            yield names[int(number[1], 16)], found[1]


def limits(switch: Switch, port: str) -> dict[str, RateLimit]:
    """The meters of a port by direction, `out` of and `into` the workload."""
    number = int(switch.configure("get", "interface", port, "ofport", wait=False))
    rates = {int(meter): int(rate) * 1000 for meter, rate in _METER.findall(switch.flows("dump-meters", BRIDGE))}
    counts = {int(meter): int(count) for meter, count in _METER_COUNT.findall(switch.flows("meter-stats", BRIDGE))}
    found = {}
    for flow in switch.dump_flows(BRIDGE):
        if metered := _METERED.search(flow):
            field, digits, meter = metered.groups()
            if int(digits, 10 if field == "in_port=" else 16) == number:
                name = "out" if field == "in_port=" else "into"
                found[name] = RateLimit(rates[int(meter)], counts[int(meter)])
    return found


def meters(switch: Switch) -> set[int]:
    """The IDs of all meters of the bridge."""
    return {int(meter) for meter, _ in _METER.findall(switch.flows("dump-meters", BRIDGE))}
