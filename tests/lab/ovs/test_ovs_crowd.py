"""A node with so many pods that some ports are made in advance."""

from __future__ import annotations

import asyncio

from tests.support import inventory
from tests.support.modes import OVS_IN_ALL_MODES
from tests.support.switch_inventory import BRIDGE, ports, tenants

from weft.lab.netlab import NetLab
from weft.lab.servers.openvswitch import Switch
from weft.lab.waiting import until

CROWD = 20


def spare(switch: Switch) -> set[str]:
    """The ports that are nobody's."""
    found = switch.configure("--columns=name", "--bare", "find", "port", "external_ids:weft-spare!=no", wait=False)
    return {*found.split()} & ports(switch)


@OVS_IN_ALL_MODES
async def test_pods_on_ports_that_were_there_are_as_others(lab: NetLab) -> None:
    """R5, N7: they reach and are reached, outlive the agent and the switch, and leave nothing behind."""
    await lab.network("wide", subnet="10.1.0.0/16", gateway="10.1.255.254")
    one = await lab.host("one")
    switch = one.switch
    assert switch is not None
    before, standing = switch.dump_flows(BRIDGE), ports(switch)
    crowd = [*await asyncio.gather(*(one.pod(f"crowd-{number}", network="wide") for number in range(CROWD)))]
    await until(lambda: bool(spare(switch)))
    while len(crowd) < 2 * CROWD:
        free = spare(switch)
        crowd.append(await one.pod(f"late-{len(crowd)}", network="wide"))
        if (free - spare(switch)) & ports(switch):
            break  # it has one of those; others before it may have come when none was ready yet
    else:
        raise AssertionError("no pod was given a port that was there")
    first, last = crowd[0], crowd[-1]
    assert await last.reaches(first)
    assert await first.reaches(last)
    await last.check()
    one.kill()
    await one.start()
    switch.kill_daemon()
    switch.start_daemon()
    await until(lambda: len(switch.dump_flows(BRIDGE)) > len(before))
    await one.ready()
    assert await last.reaches(first)
    await last.check()
    await asyncio.gather(*(pod.remove() for pod in crowd))
    await until(lambda: not tenants(switch) and ports(switch) == standing)
    await until(lambda: not [name for name in inventory.devices(one.machine) if name.startswith("wp")])
    assert switch.dump_flows(BRIDGE) == before
