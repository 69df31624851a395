"""What the agent finds when it comes back, and what the switch forgets when it goes (contiv 11.3: W28, W29)."""

from __future__ import annotations

import asyncio
import subprocess
from functools import partial

import pytest
from tests.support.modes import OVS_IN_ALL_MODES, OVS_WITH_TAGS_AND_MORE
from tests.support.sequence_stream import Stream
from tests.support.switch_inventory import BRIDGE, VLAN_BRIDGE, ports

from weft.adapters.ovs.pipeline.tables import Table
from weft.cni.errors import CniError
from weft.lab.hosts import Host
from weft.lab.netlab import NetLab
from weft.lab.servers.openvswitch import Switch
from weft.lab.waiting import DEADLINE, eventually, until

# After so many tries the agent pauses for more than a second before the next.
_PAUSES_GROW = 5


async def busy_host(lab: NetLab) -> tuple[Host, Switch]:
    """A host with pods and policy, which reaches another."""
    await lab.network("wide", subnet="10.1.0.0/16", gateway="10.1.255.254", ipv6Subnet="2001:db8:1::/64")
    (await lab.rest.put("policys", tenantName="default", policyName="guard")).accepted()
    key = {"tenantName": "default", "policyName": "guard", "ruleId": "1", "direction": "in"}
    (await lab.rest.put("rules", **key, priority=1, action="deny", protocol="tcp", port=81)).accepted()
    await lab.group("guarded", network="wide", policies=["guard"])
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    for name, host in (("a", one), ("b", one), ("c", two)):
        await host.pod(name, network="wide", group="guarded")
    assert one.switch is not None
    await settled(one.switch)
    return one, one.switch


def all_flows(switch: Switch) -> list[str]:
    """Those of our bridges, of which there are two where networks have VLAN tags."""
    bridges = switch.configure("list-br", wait=False).split()
    return [
        f"{bridge}: {flow}"
        for bridge in (BRIDGE, VLAN_BRIDGE)
        if bridge in bridges
        for flow in switch.dump_flows(bridge)
    ]


def interfaces(switch: Switch) -> list[str]:
    """What the switch has as ports, with their numbers and rows: one that was made again has another row."""
    found = switch.configure("--columns=name,ofport,_uuid", "list", "interface").split("\n\n")
    return sorted(each.strip() for each in found)


def add_theirs(switch: Switch) -> None:
    """Somebody else has a flow and a port on our bridge."""
    switch.flows("add-flow", BRIDGE, "table=200,priority=7,ip,actions=drop")
    switch.configure("add-port", BRIDGE, "theirs", "--", "set", "interface", "theirs", "type=internal")


async def settled(switch: Switch) -> list[str]:
    """The flows, when they have stopped changing."""
    seen: list[list[str]] = []

    async def look() -> list[str]:
        seen.append(await asyncio.to_thread(all_flows, switch))
        return seen[-1]

    return await eventually(look, lambda flows: len(seen) > 5 and all(each == flows for each in seen[-5:]))


@OVS_IN_ALL_MODES
async def test_a_restart_finds_all_flows_and_changes_none(lab: NetLab) -> None:
    """W29: nothing stale, nothing missing, no port made again; flows and ports of others are left alone."""
    one, switch = await busy_host(lab)
    add_theirs(switch)
    flows, there = await settled(switch), interfaces(switch)
    one.kill()
    assert all_flows(switch) == flows
    await one.start()
    assert await settled(switch) == flows
    assert interfaces(switch) == there
    assert "theirs" in ports(switch)
    assert any("table=200" in flow for flow in flows)


@OVS_IN_ALL_MODES
async def test_what_changed_while_the_agent_was_away_is_put_right(lab: NetLab) -> None:
    """Stale flows go, missing ones come, a rule that went is gone; what is left is exactly what is wanted."""
    one, switch = await busy_host(lab)
    flows = await settled(switch)
    one.kill()
    stale = f"cookie={0x77656674 << 32:#x},table=0,priority=30,in_port=9,ip,actions=goto_table:3"
    switch.flows("add-flow", BRIDGE, stale)
    switch.flows("del-flows", BRIDGE, "table=4")
    await one.start()
    assert await settled(switch) == flows
    (await lab.rest.delete("rules", "default:guard:1")).accepted()
    await eventually(
        lambda: asyncio.to_thread(switch.dump_flows, BRIDGE),
        lambda now: not any(f"table={Table.INGRESS.value}," in flow and "reg2=" in flow for flow in now),
    )


@OVS_WITH_TAGS_AND_MORE
async def test_a_switch_that_is_killed_is_filled_again(lab: NetLab) -> None:
    """W28: ovs-vswitchd comes back without flows; the agent notices by itself, and pods start while it is away."""
    one, switch = await busy_host(lab)
    flows = await settled(switch)
    add_theirs(switch)
    there = interfaces(switch)
    switch.kill_daemon()
    switch.start_daemon()
    await until(lambda: len(all_flows(switch)) >= len(flows))
    assert await settled(switch) == flows  # the flow of others is theirs to put back
    assert interfaces(switch) == there
    d = await one.pod("d", network="wide", group="guarded")
    e = await one.pod("e", network="wide", group="guarded")
    assert await d.reaches(e)


@OVS_IN_ALL_MODES
async def test_a_rule_of_meanwhile_holds_as_soon_as_the_switch_is_back(lab: NetLab) -> None:
    """W28: the agent has heard of it and pauses before its next try; no packet passes by the flows of before."""
    one, switch = await busy_host(lab)
    d, e = [await one.pod(name, network="wide", group="guarded") for name in "de"]
    rule = {"tenantName": "default", "policyName": "guard", "ruleId": "2", "direction": "in", "priority": 1}
    with Stream(d.place(), e.place(), port=82, rate=1000) as stream:
        await until(lambda: stream.arrived > 0)
        switch.kill_daemon()
        await until(lambda: faults(one) > _PAUSES_GROW)
        (await lab.rest.put("rules", **rule, action="deny", protocol="udp", port=82)).accepted()
        await eventually(partial(lag, one), bool)
        arrived = stream.arrived
        switch.start_daemon(wait=False)
        await eventually(partial(lag, one), lambda revisions: not revisions)
        await settled(switch)
        stream.stop()
        assert stream.sent - stream.count_missing() == arrived


def faults(host: Host) -> int:
    """How often the agent has tried in vain to tell the switch."""
    return (host.home / "netplugin.log").read_text().count("datapath fault")


async def lag(host: Host) -> int:
    """How many revisions of the store the agent knows and has not carried out."""
    question = ["nsenter", f"--net={host.machine}", "--", "curl", "-sf", "http://127.0.0.1:9090/metrics"]
    told = await asyncio.to_thread(subprocess.check_output, question, timeout=DEADLINE, text=True)
    (line,) = [line for line in told.splitlines() if line.startswith("weft_agent_reconcile_lag_revisions ")]
    return int(float(line.split()[1]))


@OVS_IN_ALL_MODES
async def test_flows_that_others_take_away_come_back(lab: NetLab) -> None:
    """Without a restart: the agent looks now and then how many there are."""
    _, switch = await busy_host(lab)
    flows = await settled(switch)
    switch.flows("del-flows", BRIDGE)
    await until(lambda: len(all_flows(switch)) >= len(flows))
    assert await settled(switch) == flows


@OVS_IN_ALL_MODES
async def test_a_database_that_is_killed_is_asked_again(lab: NetLab) -> None:
    """Without it ovs-vswitchd does nothing, not even forward (userspace datapath); all is as before when it is back."""
    one, switch = await busy_host(lab)
    add_theirs(switch)
    flows, there = await settled(switch), interfaces(switch)
    switch.kill_database()
    switch.start_database()
    assert await settled(switch) == flows
    assert interfaces(switch) == there
    await one.ready()
    d = await one.pod("d", network="wide", group="guarded")
    e = await one.pod("e", network="wide", group="guarded")
    assert await d.reaches(e)


@OVS_IN_ALL_MODES
async def test_a_rebooted_machine_starts_from_nothing(lab: NetLab) -> None:
    """The database remembers ports whose devices are gone with the machine: they go, and new pods come."""
    one, switch = await busy_host(lab)
    await lab.reboot(one)
    await until(lambda: not [name for name in ports(switch) if name.startswith("wp")])
    d, e = await one.pod("d", network="wide"), await one.pod("e", network="wide")
    assert await d.reaches(e)


@OVS_IN_ALL_MODES
async def test_a_pod_that_leaves_while_the_switch_is_away_leaves_nothing(lab: NetLab) -> None:
    """DEL is refused, since nobody can say what the switch would do when it comes back, and works when it has."""
    await lab.network("wide", subnet="10.1.0.0/16", gateway="10.1.255.254")
    one = await lab.host("one")
    switch = one.switch
    assert switch is not None
    a, b = [await one.pod(name, network="wide") for name in ("a", "b")]
    switch.kill_daemon()
    with pytest.raises(CniError, match="mgmt"):
        await a.detach()
    assert await a.never_reaches(b)
    switch.start_daemon()
    await one.ready()
    await a.detach()
    await until(lambda: len([name for name in ports(switch) if name.startswith("wp")]) == 1)
    assert not [flow for flow in switch.dump_flows(BRIDGE) if f"={a.address()} " in flow or f"={a.address()}," in flow]
