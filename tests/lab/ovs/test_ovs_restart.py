"""Restarts of agent, ovs-vswitchd, ovsdb-server and machine (contiv 11.3: W28, W29)."""

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

# After so many retries the agent's backoff is above a second.
_LONG_BACKOFF = 5


async def busy_host(lab: NetLab) -> tuple[Host, Switch]:
    """A host with pods and policy, and a pod on another host."""
    await lab.network("wide", subnet="10.1.0.0/16", gateway="10.1.255.254", ipv6Subnet="2001:db8:1::/64")
    (await lab.rest.put("policys", tenantName="default", policyName="guard")).accepted()
    key = {"tenantName": "default", "policyName": "guard", "ruleId": "1", "direction": "in"}
    (await lab.rest.put("rules", **key, priority=1, action="deny", protocol="tcp", port=81)).accepted()
    await lab.group("guarded", network="wide", policies=["guard"])
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    for name, host in (("a", one), ("b", one), ("c", two)):
        await host.pod(name, network="wide", group="guarded")
    assert one.switch is not None
    await stable_flows(one.switch)
    return one, one.switch


def all_flows(switch: Switch) -> list[str]:
    """The flows of both bridges; the VLAN bridge exists only with VLAN networks."""
    bridges = switch.configure("list-br", wait=False).split()
    return [
        f"{bridge}: {flow}"
        for bridge in (BRIDGE, VLAN_BRIDGE)
        if bridge in bridges
        for flow in switch.dump_flows(bridge)
    ]


def interfaces(switch: Switch) -> list[str]:
    """Ports with number and row UUID, which changes when a port is recreated."""
    found = switch.configure("--columns=name,ofport,_uuid", "list", "interface").split("\n\n")
    return sorted(each.strip() for each in found)


def add_foreign(switch: Switch) -> None:
    """Add a foreign flow and port to our bridge."""
    switch.flows("add-flow", BRIDGE, "table=200,priority=7,ip,actions=drop")
    switch.configure("add-port", BRIDGE, "theirs", "--", "set", "interface", "theirs", "type=internal")


async def stable_flows(switch: Switch) -> list[str]:
    """Wait until the flows stop changing, and return them."""
    seen: list[list[str]] = []

    async def poll() -> list[str]:
        seen.append(await asyncio.to_thread(all_flows, switch))
        return seen[-1]

    return await eventually(poll, lambda flows: len(seen) > 5 and all(each == flows for each in seen[-5:]))


@OVS_IN_ALL_MODES
async def test_a_restart_finds_all_flows_and_changes_none(lab: NetLab) -> None:
    """W29: nothing stale, nothing missing, no port recreated; foreign flows and ports stay."""
    one, switch = await busy_host(lab)
    add_foreign(switch)
    flows, there = await stable_flows(switch), interfaces(switch)
    one.kill()
    assert all_flows(switch) == flows
    await one.start()
    assert await stable_flows(switch) == flows
    assert interfaces(switch) == there
    assert "theirs" in ports(switch)
    assert any("table=200" in flow for flow in flows)


@OVS_IN_ALL_MODES
async def test_drift_during_an_agent_outage_is_repaired(lab: NetLab) -> None:
    """Stale flows are removed, missing ones added, and a deleted rule is gone."""
    one, switch = await busy_host(lab)
    flows = await stable_flows(switch)
    one.kill()
    stale = f"cookie={0x77656674 << 32:#x},table=0,priority=30,in_port=9,ip,actions=goto_table:3"
    switch.flows("add-flow", BRIDGE, stale)
    switch.flows("del-flows", BRIDGE, "table=4")
    await one.start()
    assert await stable_flows(switch) == flows
    (await lab.rest.delete("rules", "default:guard:1")).accepted()
    await eventually(
        lambda: asyncio.to_thread(switch.dump_flows, BRIDGE),
        lambda now: not any(f"table={Table.INGRESS_RULE.value}," in flow and "reg2=" in flow for flow in now),
    )


@OVS_WITH_TAGS_AND_MORE
async def test_flows_are_restored_after_a_vswitchd_crash(lab: NetLab) -> None:
    """W28: ovs-vswitchd restarts without flows; the agent notices, and pods can start."""
    one, switch = await busy_host(lab)
    flows = await stable_flows(switch)
    add_foreign(switch)
    there = interfaces(switch)
    switch.kill_daemon()
    switch.start_daemon()
    await until(lambda: len(all_flows(switch)) >= len(flows))
    assert await stable_flows(switch) == flows  # restoring the foreign flow is not our job
    assert interfaces(switch) == there
    d = await one.pod("d", network="wide", group="guarded")
    e = await one.pod("e", network="wide", group="guarded")
    assert await d.eventually_reaches(e)


@OVS_IN_ALL_MODES
async def test_policy_changed_during_a_vswitchd_outage_applies_at_once(lab: NetLab) -> None:
    """W28: the agent knows the new rule, but is in backoff; no packet passes by the old flows."""
    one, switch = await busy_host(lab)
    d, e = [await one.pod(name, network="wide", group="guarded") for name in "de"]
    rule = {"tenantName": "default", "policyName": "guard", "ruleId": "2", "direction": "in", "priority": 1}
    with Stream(d.place(), e.place(), port=82, rate=1000) as stream:
        await until(lambda: stream.arrived > 0)
        switch.kill_daemon()
        await until(lambda: faults(one) > _LONG_BACKOFF)
        (await lab.rest.put("rules", **rule, action="deny", protocol="udp", port=82)).accepted()
        await eventually(partial(lag, one), bool)
        arrived = stream.arrived
        switch.start_daemon(wait=False)
        await eventually(partial(lag, one), lambda revisions: not revisions)
        await stable_flows(switch)
        stream.stop()
        assert stream.sent - stream.count_missing() == arrived


def faults(host: Host) -> int:
    """How many datapath faults the agent has logged."""
    return (host.home / "netplugin.log").read_text().count("datapath fault")


async def lag(host: Host) -> int:
    """How many store revisions the agent has received and not applied."""
    command = ["nsenter", f"--net={host.netns}", "--", "curl", "-sf", "http://127.0.0.1:9090/metrics"]
    metrics = await asyncio.to_thread(subprocess.check_output, command, timeout=DEADLINE, text=True)
    (line,) = [line for line in metrics.splitlines() if line.startswith("weft_agent_reconcile_lag_revisions ")]
    return int(float(line.split()[1]))


@OVS_IN_ALL_MODES
async def test_deleted_flows_are_restored(lab: NetLab) -> None:
    """Without a restart: the agent counts them periodically."""
    _, switch = await busy_host(lab)
    flows = await stable_flows(switch)
    switch.flows("del-flows", BRIDGE)
    await until(lambda: len(all_flows(switch)) >= len(flows))
    assert await stable_flows(switch) == flows


@OVS_IN_ALL_MODES
async def test_the_agent_reconnects_after_an_ovsdb_crash(lab: NetLab) -> None:
    """Without ovsdb-server the userspace datapath does not even forward; afterwards nothing has changed."""
    one, switch = await busy_host(lab)
    add_foreign(switch)
    flows, there = await stable_flows(switch), interfaces(switch)
    switch.kill_database()
    switch.start_database()
    assert await stable_flows(switch) == flows
    assert interfaces(switch) == there
    await one.ready()
    d = await one.pod("d", network="wide", group="guarded")
    e = await one.pod("e", network="wide", group="guarded")
    assert await d.eventually_reaches(e)


@OVS_IN_ALL_MODES
async def test_a_rebooted_machine_starts_from_nothing(lab: NetLab) -> None:
    """OVSDB still has ports whose devices are gone: they are removed, and new pods can start."""
    one, switch = await busy_host(lab)
    await lab.reboot(one)
    await until(lambda: not [name for name in ports(switch) if name.startswith("wp")])
    d, e = await one.pod("d", network="wide"), await one.pod("e", network="wide")
    assert await d.eventually_reaches(e)


@OVS_IN_ALL_MODES
async def test_a_pod_deleted_during_a_vswitchd_outage_leaves_nothing(lab: NetLab) -> None:
    """DEL fails, because the switch might come back with its flows, and succeeds afterwards."""
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
