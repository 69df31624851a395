"""The ovs datapath (userspace `netdev`), compared with a bare switch and with a hand-written `ct` pipeline.

Ours and the peer alternate, and medians are reported. The latency of an ADD is from exec of `weft-cni` to its exit.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from statistics import median

from tests.support.sequence_stream import Stream

from bench import rule_changes
from bench.bare_switch import BareSwitch, HandMade
from bench.figures import Figure, Skipped, figure
from bench.labs import AT_ONCE, NETWORK, attach, measure_alternating, pair_of, restart, start_servers
from weft.adapters.ovs.openflow.client import OpenFlow
from weft.adapters.ovs.openflow.fields import match
from weft.adapters.ovs.openflow.flows import Flow
from weft.cni.errors import Code
from weft.kernel.netns import Namespace
from weft.lab.hosts import Host
from weft.lab.namespaces import private_namespaces
from weft.lab.netlab import NetLab, open_lab
from weft.lab.servers.openvswitch import running_switch
from weft.lab.traffic import NetnsAddress
from weft.lab.waiting import DEADLINE, until

FLOWS = 10_000
# Pods on the node: up to this number one at a time, and for agent restarts.
ALONE, LOCAL = 100, 200
# Pods, and ports of the bare switch, when both are measured alternately.
BEYOND = (100, 200, 300)
TURNS, REST_S = 20, 0.2
ROUNDS = 5
RESTARTS, SWITCH_RESTARTS = 3, 7
RATE = 1000
_CONFIG = json.dumps({"cniVersion": "1.1.0", "name": "weft", "type": "weft-cni"}).encode()
_RULE = {"tenantName": "default", "policyName": "guard", "direction": "in", "priority": 2, "action": "allow"}
_GROUP = "guarded"


def run() -> dict[str, Figure]:
    if os.geteuid() != 0:
        raise Skipped("creating network namespaces needs root")
    if shutil.which("ovs-vswitchd") is None:
        raise Skipped("Open vSwitch is not installed")
    with private_namespaces():
        figures = _measure_flows() | asyncio.run(_measure())
    return figures | rule_changes.run(datapath="ovs")


def _measure_flows() -> dict[str, Figure]:
    """Many flows in one bundle, into an empty bridge."""
    flows = [
        Flow(4, 800, match({"reg0": 1, "eth_type": 0x800, "ip_dst": (number, 0xFFFFFFFF)})) for number in range(FLOWS)
    ]
    times = []
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as directory, running_switch(Path(directory)) as switch:
        for number in range(ROUNDS):
            bridge = f"br{number}"
            switch.configure(
                "add-br",
                bridge,
                "--",
                "set",
                "bridge",
                bridge,
                "datapath_type=netdev",
                "fail_mode=secure",
                "protocols=OpenFlow14",
            )
            openflow = OpenFlow(switch.management(bridge))
            began = time.perf_counter()
            openflow.change(put=flows)
            times.append(time.perf_counter() - began)
            openflow.close()
    return {
        "full sync of 10,000 flows": figure(
            median(times), unit="s", target=0.5, note=f"one bundle, median of {ROUNDS}, fastest {min(times):.2f}"
        )
    }


async def _measure() -> dict[str, Figure]:
    async with open_lab(datapath="ovs", shim="c") as lab:
        await lab.network(NETWORK, subnet="10.7.0.0/16", gateway="10.7.0.1")
        (await lab.rest.put("policys", tenantName="default", policyName="guard")).accepted()
        closed = {**_RULE, "ruleId": "closed", "priority": 1, "action": "deny", "protocol": "tcp", "port": 1}
        (await lab.rest.put("rules", **closed)).accepted()
        await lab.group(_GROUP, network=NETWORK, policies=["guard"])
        one, two = await lab.host("one"), await lab.host("two")
        figures = await _measure_packets(lab, one, two)
        figures |= await _measure_switch_restart(lab, two)
        figures |= await asyncio.to_thread(_measure_many, two)
        two.close()
        figures |= await asyncio.to_thread(_measure_alone, one)
        with ExitStack() as stack:
            bare = BareSwitch(lab.directory / "bare", stack, ports=max(BEYOND) + TURNS)
            present = ALONE
            for count in BEYOND:
                await _attach_many(one, range(present, count))
                present = count + TURNS
                if count == LOCAL:
                    figures |= await _measure_restart(one)
                figures |= await asyncio.to_thread(_measure_at, one, bare, count)
        return figures


async def _attach_many(host: Host, numbers: Iterable[int]) -> None:
    turns = asyncio.Semaphore(AT_ONCE)
    await asyncio.gather(*(attach(host, f"rest-{number}", turns) for number in numbers))


async def _measure_restart(host: Host) -> dict[str, Figure]:
    times = [await restart(host) for _ in range(RESTARTS)]
    note = f"from exec to STATUS, {LOCAL} pods; median of {RESTARTS}"
    return {"restart to ready": figure(median(times), unit="s", target=1.0, note=note)}


async def _measure_packets(lab: NetLab, one: Host, two: Host) -> dict[str, Figure]:
    here, near, far = [
        await host.pod(name, network=NETWORK) for name, host in (("here", one), ("near", one), ("far", two))
    ]
    with ExitStack() as stack:
        hand = HandMade(lab.directory / "hand", stack)
        places = {
            "one host": (pair_of(here, near), hand.one_host()),
            "two hosts": (pair_of(here, far), hand.two_hosts()),
        }
        await start_servers(places, stack)
        found = await asyncio.to_thread(measure_alternating, places, rounds=ROUNDS)
    figures = {}
    for place in places:
        ours, peer = (median(found[place, side, "ping"]) for side in (0, 1))
        note = "64 bytes by TCP, both ends on one core; peer: hand-written ct pipeline"
        figures[f"round trip, {place}"] = figure(ours, peer=peer, unit="us", target=peer / 0.9, note=note)
        ours, peer = (median(found[place, side, "send"]) for side in (0, 1))
        figures[f"TCP throughput, {place}"] = figure(
            ours,
            peer=peer,
            unit="MB/s",
            target=0.9 * peer,
            more_is_better=True,
            note="one stream; peer: hand-written ct pipeline",
        )
    return figures


async def _measure_switch_restart(lab: NetLab, host: Host) -> dict[str, Figure]:
    """Packets lost when ovs-vswitchd is killed and restarted, compared with a plain bridge on the same switch.

    The flows of that bridge are reinstalled as soon as the switch answers.
    """
    assert host.switch is not None
    switch, lost = host.switch, []
    pods = [await host.pod(f"restarted-{number}", network=NETWORK) for number in (1, 2)]
    with ExitStack() as stack:
        hand = HandMade(lab.directory / "beside", stack)
        pair = hand.on_switch(host.netns, switch)
        theirs = [
            NetnsAddress(stack.enter_context(Namespace.open(path)), ip_address(address))
            for path, address in ((pair.client, "10.97.0.1"), (pair.server, pair.address))
        ]
        for number in range(SWITCH_RESTARTS):
            ends = ((pods[0].place(), pods[1].place()), (theirs[0], theirs[1]))
            with ExitStack() as sending:
                streams = [sending.enter_context(Stream(*each, port=5000 + number, rate=RATE)) for each in ends]
                await _wait_for_packets(streams)
                await asyncio.to_thread(switch.kill_daemon)
                switch.start_daemon(wait=False)
                while not await asyncio.to_thread(hand.put_flows, switch):
                    pass
                await _wait_for_packets(streams)
                for each in streams:
                    each.stop()
                await asyncio.sleep(REST_S)  # packets in flight; their loss is no event
                lost.append([each.count_missing() for each in streams])
        switch.configure("del-br", "hand")
    for pod in pods:
        await pod.remove()
    lost_here, lost_there = (median(each) for each in zip(*lost, strict=True))
    return {
        "packets lost in an ovs-vswitchd restart": figure(
            lost_here, peer=lost_there, unit="packets", target=lost_there, note=f"of {RATE} a second; {lost}"
        )
    }


async def _wait_for_packets(streams: Sequence[Stream]) -> None:
    """Return when half a second's worth of packets of each stream has arrived."""
    wanted = [each.arrived + RATE // 2 for each in streams]
    await until(lambda: all(each.arrived > count for each, count in zip(streams, wanted, strict=True)))


def _measure_many(host: Host) -> dict[str, Figure]:
    """Eight concurrent ADDs, on a nearly empty node."""
    names = [f"many-{number}" for number in range(ALONE - 4)]
    for name in names:
        host.make_netns(name)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        began = time.perf_counter()
        times = [*threads.map(lambda name: _add(host, name), names)]
        rate = len(names) / (time.perf_counter() - began)
    return {
        "ADD rate, 8 at once": figure(
            rate,
            unit="1/s",
            target=60.0,
            more_is_better=True,
            note=f"{len(names)} pods; ADD p50 {median(times):.0f} ms",
        )
    }


def _measure_alone(host: Host) -> dict[str, Figure]:
    """One ADD after another."""
    times = [_add(host, f"alone-{number}") for number in range(2, ALONE)]
    note = f"p50 of the last 20: {median(times[-20:]):.1f}, fastest {min(times):.1f}"
    return {"ADD p50, one at a time, up to 100 pods": figure(median(times), unit="ms", target=25.0, note=note)}


def _measure_at(host: Host, bare: BareSwitch, count: int) -> dict[str, Figure]:
    """An ADD and a port of a bare switch alternately, with this number of pods and ports, and both switches idle.

    A switch keeps reconfiguring its ports after it has assigned an ofport. Without a pause the peer, which is measured
    after our longer turn, would find its switch idle, and we would not.
    """
    bare.fill(count)
    ours, peer = [], []
    for number in range(TURNS):
        time.sleep(REST_S)  # idle is no observable state
        ours.append(_add(host, f"beyond-{count}-{number}"))
        time.sleep(REST_S)
        peer.append(bare.add(1))
    note = f"peer: commit to ofport of a bare switch, by turns; fastest {min(ours):.1f} and {min(peer):.1f}"
    return {
        f"ADD p50 at {count} pods": figure(
            median(ours), peer=median(peer), unit="ms", target=1.3 * median(peer), note=note
        )
    }


def _add(host: Host, name: str) -> float:
    """The latency of an ADD in milliseconds, with immediate retries on "try again later"."""
    named = {
        "COMMAND": "ADD",
        "CONTAINERID": name,
        "NETNS": str(host.make_netns(name)),
        "IFNAME": "eth0",
        "PATH": str(host.program.parent),
        "ARGS": f"IgnoreUnknown=1;io.contiv.network={NETWORK};io.contiv.net-group={_GROUP}",
    }
    own = {"WEFT_CNI_SOCKET": str(host.socket), "WEFT_CNI_LOG": str(host.home / "cni.log")}
    environment = {f"CNI_{key}": value for key, value in named.items()} | own
    began = time.perf_counter()
    while time.perf_counter() < began + DEADLINE:
        done = subprocess.run(
            [host.program], env=environment, input=_CONFIG, capture_output=True, check=False, timeout=DEADLINE
        )
        if done.returncode == 0:
            return (time.perf_counter() - began) * 1e3
        if json.loads(done.stdout)["code"] != Code.TRY_LATER:
            break
    raise SystemExit(f"bench.ovs: ADD of {name}: {done.stdout.decode()}")
