"""What a host's Open vSwitch really has, read without our own code: by `ovs-vsctl` and `ovs-ofctl`."""

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


class Limited(NamedTuple):
    """What a switch or a kernel lets pass: bits per second; and how many bytes have come by."""

    rate: int
    passed: int


def tenants(switch: Switch) -> dict[int, str]:
    """The tenants that have a number, by it."""
    if BRIDGE not in switch.configure("list-br", wait=False).split():
        return {}
    marks = switch.configure("get", "bridge", BRIDGE, "external_ids", wait=False)
    return {int(number): tenant for tenant, number in _TENANT.findall(marks)}


def ports(switch: Switch) -> set[str]:
    """The ports of the bridge, besides its own."""
    if BRIDGE not in switch.configure("list-br", wait=False).split():
        return set()
    return set(switch.configure("list-ports", BRIDGE, wait=False).split())


def uplinks(switch: Switch) -> set[str]:
    """The interfaces that carry frames with VLAN tags."""
    return set(switch.configure("list-ifaces", VLAN_BRIDGE, wait=False).split()) - {"weft-vlan-up"}


def reachable(switch: Switch) -> Iterator[tuple[str, str]]:
    """Tenant and address of everyone who is sent to by a port of a workload."""
    names = tenants(switch)
    for flow in switch.dump_flows(BRIDGE):
        found, number = _TARGET.search(flow), _REGISTER.search(flow)
        if found and number and "->reg4" in flow and "set_field:0x1->reg6" in flow:
            yield names[int(number[1], 16)], found[1]


def heard(switch: Switch) -> Iterator[tuple[str, str]]:
    """Tenant and address of everyone who may speak, once for each port."""
    names = tenants(switch)
    for flow in switch.dump_flows(BRIDGE):
        found, number = _SOURCE.search(flow), _WRITTEN.search(flow)
        if found and number and "in_port=" in flow and "goto_table" in flow and "icmp_type" not in flow:
            yield names[int(number[1], 16)], found[1]


def limits(switch: Switch, port: str) -> dict[str, Limited]:
    """How much the switch lets a port send (`out`) and get (`into`); nothing where that is all."""
    number = int(switch.configure("get", "interface", port, "ofport", wait=False))
    rates = {int(meter): int(rate) * 1000 for meter, rate in _METER.findall(switch.flows("dump-meters", BRIDGE))}
    counts = {int(meter): int(count) for meter, count in _METER_COUNT.findall(switch.flows("meter-stats", BRIDGE))}
    found = {}
    for flow in switch.dump_flows(BRIDGE):
        if metered := _METERED.search(flow):
            way, digits, meter = metered.groups()
            if int(digits, 10 if way == "in_port=" else 16) == number:
                name = "out" if way == "in_port=" else "into"
                found[name] = Limited(rates[int(meter)], counts[int(meter)])
    return found


def meters(switch: Switch) -> set[int]:
    """The numbers of all meters of the bridge."""
    return {int(meter) for meter, _ in _METER.findall(switch.flows("dump-meters", BRIDGE))}
