"""Incomplete state and long outages: in the end the switch has exactly the desired state."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from tests.support import inventory
from tests.support.modes import OVS_IN_ALL_MODES
from tests.support.switch_inventory import BRIDGE, ports, tenants

from weft.cni.errors import CniError
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.servers.openvswitch import Switch
from weft.lab.waiting import eventually, until

OURS = f"cookie={0x77656674 << 32:#x}"


async def two_pods(lab: NetLab) -> tuple[Host, Switch, list[Pod]]:
    """A host with two pods. Policy allows port 80 and denies port 81."""
    await lab.network("wide", subnet="10.1.0.0/16", gateway="10.1.255.254")
    (await lab.rest.put("policys", tenantName="default", policyName="guard")).accepted()
    await deny(lab, port=81)
    await lab.group("guarded", network="wide", policies=["guard"])
    one = await lab.host("one")
    assert one.switch is not None
    return one, one.switch, [await one.pod(name, network="wide", group="guarded") for name in ("a", "b")]


async def deny(lab: NetLab, *, port: int) -> None:
    key = {"tenantName": "default", "policyName": "guard", "ruleId": str(port), "direction": "in"}
    (await lab.rest.put("rules", **key, priority=1, action="deny", protocol="tcp", port=port)).accepted()


async def has_flows(switch: Switch, wanted: list[str]) -> None:
    """Return when the switch has exactly these flows, by `ovs-ofctl`."""
    await eventually(lambda: asyncio.to_thread(switch.dump_flows, BRIDGE), lambda flows: flows == wanted)


@OVS_IN_ALL_MODES
async def test_state_of_a_killed_agent_is_repaired(lab: NetLab) -> None:
    """W29, W31: a port without device, a device without port, stale flows and a deleted tenant."""
    one, switch, (a, b) = await two_pods(lab)
    flows = switch.dump_flows(BRIDGE)
    one.kill()
    add = ("add-port", BRIDGE, "wp00000000aaa", "--", "set", "port", "wp00000000aaa", 'external_ids:weft=""')
    switch.configure(*add, wait=False)
    inventory.run(one.netns, "ip link add wp00000000bbb type veth peer name other")
    switch.flows("add-flow", BRIDGE, f"{OURS},table=0,priority=30,in_port=77,ip,actions=goto_table:3")
    switch.configure("set", "bridge", BRIDGE, "external_ids:weft-tenant-gone=99")
    await one.start()
    await has_flows(switch, flows)
    assert not {"wp00000000aaa", "wp00000000bbb"} & (ports(switch) | set(inventory.devices(one.netns)))
    assert set(tenants(switch).values()) == {"default"}
    assert await a.eventually_reaches(b)


@OVS_IN_ALL_MODES
@pytest.mark.parametrize(
    "seconds", [pytest.param(1.0, id="a while"), pytest.param(30.0, id="30 s", marks=pytest.mark.soak)]
)
async def test_long_outage_of_both_daemons(lab: NetLab, seconds: float) -> None:
    """W27: the agent keeps running, reports the error, and installs the current policy when they are back."""
    one, switch, (a, b) = await two_pods(lab)
    assert await a.eventually_reaches(b, port=82)
    switch.close()
    await asyncio.sleep(seconds)
    assert one.agent.running
    await deny(lab, port=82)
    with pytest.raises(CniError, match="Connection refused"):
        await one.pod("c", network="wide", group="guarded")
    switch.start()
    await one.ready()
    c = await one.pod("c", network="wide", group="guarded")
    for source in (a, c):
        assert await source.eventually_reaches(b, port=80)
        assert await source.never_reaches(b, port=82)
    flows = switch.dump_flows(BRIDGE)
    one.kill()
    await one.start()
    await has_flows(switch, flows)


async def until_check_passes(*pods: Pod) -> None:
    """Wait until CNI CHECK passes for all pods."""

    async def check_error(pod: Pod) -> str:
        try:
            await pod.check()
        except CniError as error:
            return str(error)
        return ""

    for pod in pods:
        await eventually(partial(check_error, pod), lambda error: not error)


@OVS_IN_ALL_MODES
async def test_devices_deleted_by_exit_cleanup_are_restored(lab: NetLab) -> None:
    """R5, W29: `ovs-appctl exit --cleanup` deletes every internal port, and the macvlans on them.

    Pods are plugged rows_after with the same addresses, and tenant netns are attached rows_after.
    """
    one, switch, (a, b) = await two_pods(lab)
    before = a.address(), b.address()
    switch.command("exit", "--cleanup")
    await until(lambda: not [name for name in inventory.devices(one.netns) if name.startswith(("wp", "wl"))])
    switch.kill_daemon()
    switch.start_daemon()
    await until_check_passes(a, b)
    assert (a.address(), b.address()) == before
    for source, target in ((a, b), (b, a)):
        assert await source.eventually_reaches(target)
    await inventory.wait_consistent(lab)


@OVS_IN_ALL_MODES
async def test_a_deleted_port_is_restored(lab: NetLab) -> None:
    """R5: existing ports are never recreated, a missing one is."""
    _, switch, (a, b) = await two_pods(lab)
    names = ports(switch)
    rows = switch.configure("--columns=name,_uuid", "list", "interface")
    lost, *_ = sorted(name for name in names if name.startswith("wp"))
    for _ in range(2):
        switch.configure("del-port", BRIDGE, lost)
        await until_check_passes(a, b)
    assert ports(switch) == names
    assert await a.eventually_reaches(b)
    rows_after = switch.configure("--columns=name,_uuid", "list", "interface")
    kept = [each for each in rows.split("\n\n") if lost not in each]
    assert all(each.strip() in rows_after for each in kept)
