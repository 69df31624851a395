"""A node with so many pods that it has a port pool."""

from __future__ import annotations

import asyncio

from tests.support import inventory
from tests.support.modes import OVS_IN_ALL_MODES
from tests.support.switch_inventory import BRIDGE, ports, tenants

from weft.lab.netlab import NetLab
from weft.lab.servers.openvswitch import Switch
from weft.lab.waiting import until

PODS = 20


def pool_names(switch: Switch) -> set[str]:
    """The names of pool ports."""
    found = switch.configure("--columns=name", "--bare", "find", "port", "external_ids:weft-pool!=no", wait=False)
    return {*found.split()} & ports(switch)


@OVS_IN_ALL_MODES
async def test_pods_on_pool_ports_work_like_others(lab: NetLab) -> None:
    """R5, N7: they reach others, survive restarts of agent and switch, and leave nothing behind."""
    await lab.network("wide", subnet="10.1.0.0/16", gateway="10.1.255.254")
    one = await lab.host("one")
    switch = one.switch
    assert switch is not None
    before, base_ports = switch.dump_flows(BRIDGE), ports(switch)
    pods = [*await asyncio.gather(*(one.pod(f"pods-{number}", network="wide") for number in range(PODS)))]
    await until(lambda: bool(pool_names(switch)))
    while len(pods) < 2 * PODS:
        free = pool_names(switch)
        pods.append(await one.pod(f"late-{len(pods)}", network="wide"))
        if (free - pool_names(switch)) & ports(switch):
            break  # it has a pool port; for pods before it none may have been ready
    else:
        raise AssertionError("no pod got a pool port")
    first, last = pods[0], pods[-1]
    assert await last.eventually_reaches(first)
    assert await first.eventually_reaches(last)
    await last.check()
    one.kill()
    await one.start()
    switch.kill_daemon()
    switch.start_daemon()
    await until(lambda: len(switch.dump_flows(BRIDGE)) > len(before))
    await one.ready()
    assert await last.eventually_reaches(first)
    await last.check()
    await asyncio.gather(*(pod.remove() for pod in pods))
    await until(lambda: not tenants(switch) and ports(switch) == base_ports)
    await until(lambda: not [name for name in inventory.devices(one.netns) if name.startswith("wp")])
    assert switch.dump_flows(BRIDGE) == before
