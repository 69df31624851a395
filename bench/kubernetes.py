"""Figures of a real Kubernetes cluster: one node with our plugin, and one with Debian's `bridge` and `host-local`.

Both nodes are the same otherwise, kubelet and containerd included, and pods come to them by turns: to ours, to theirs,
to theirs, to ours, and so on. The ratio is the median of those of four neighbours in time, since a machine's mood lasts
longer. What a sandbox took is read from containerd's own log. Then the services of a cluster without kubelets
(`bench.kube_services`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import time
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.kubernetes.cluster import PODS, WITHIN, Cluster, holds, open_cluster
from tests.support.kubernetes.documents import IMAGE
from tests.support.kubernetes.node import Node
from tests.support.runtimes import take_own_disk

from bench import kube_services
from bench.figures import Figure, Skipped, figure
from weft.lab.namespaces import stepped_apart
from weft.lab.netlab import open_lab
from weft.lab.waiting import eventually

CHECKOUT = Path(__file__).parents[1]
OURS, THEIRS = "ours", "theirs"
# Pods that come alone to each node; the first ones meet cold caches.
ALONE, NOT_COUNTED = 24, 2
# How many pods come at once, and in how many rounds.
CROWDS = {20: 4, 100: 2}
TARGET = 1.05
PEER = "peer: the same node with Debian's bridge + host-local, ABBA"
_BRIDGE = {
    "cniVersion": "1.0.0",
    "name": "theirs",
    "plugins": [
        {
            "type": "bridge", "bridge": "br0", "isGateway": True, "ipMasq": False,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.250.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}]},
        }
    ],
}  # fmt: skip
_PLUGINS = ("bridge", "host-local")
_FOLDER = Path("/usr/lib/cni")
_BEGINS = re.compile(r'time="([^"]+)" .*msg="RunPodSandbox for &PodSandboxMetadata\{Name:([\w-]+),[^"]*\}"')
_RETURNS = re.compile(
    r'time="([^"]+)" .*msg="RunPodSandbox for &PodSandboxMetadata\{Name:([\w-]+),.*returns sandbox id'
)


def run() -> dict[str, Figure]:
    if os.geteuid() != 0:
        raise Skipped("containers need root")
    for needed in _PLUGINS:
        if not (_FOLDER / needed).exists():
            raise Skipped(f"{_FOLDER / needed} is missing")
    built = subprocess.run([CHECKOUT / "scripts" / "build-kubernetes"], capture_output=True, text=True, check=True)
    programs = Path(built.stdout.strip())
    with stepped_apart():
        take_own_disk()
        figures = asyncio.run(_measure_pods(programs))
    return {**figures, **kube_services.run(programs)}


async def _measure_pods(programs: Path) -> dict[str, Figure]:
    async with open_lab() as lab, open_cluster(lab, programs=programs) as cluster:
        nodes = [await cluster.node(name, "--node-ttl", "30") for name in (OURS, THEIRS)]
        _use_bridge(nodes[1])
        alone = await _measure_alone(cluster)
        together = await _measure_together(cluster)
    return {**alone, **together}


def _use_bridge(node: Node) -> None:
    """From now on containerd calls the others' plugins: it takes the first list of the folder."""
    for plugin in _PLUGINS:
        (node.root / "opt/cni/bin" / plugin).write_bytes((_FOLDER / plugin).read_bytes())
        (node.root / "opt/cni/bin" / plugin).chmod(0o755)
    (node.root / "etc/cni/net.d/00-theirs.conflist").write_text(json.dumps(_BRIDGE))


async def _measure_alone(cluster: Cluster) -> dict[str, Figure]:
    """One pod at a time, here and there by turns."""
    for number in range(ALONE + NOT_COUNTED):
        for node in _order(number):
            await _come_and_go(cluster, node, [f"alone-{number}"])
    ours, theirs = (_sandbox_times(cluster.nodes[node])[NOT_COUNTED:] for node in (OURS, THEIRS))
    return _compared("RunPodSandbox", ours, theirs, unit="ms", note=f"{ALONE} each, by containerd's log")


async def _measure_together(cluster: Cluster) -> dict[str, Figure]:
    """Many pods at once, on one node and then on the other."""
    figures: dict[str, Figure] = {}
    for crowd, rounds in CROWDS.items():
        times: dict[str, list[float]] = {OURS: [], THEIRS: []}
        for number in range(rounds):
            for node in _order(number):
                names = [f"crowd-{each}" for each in range(crowd)]
                times[node].append(await _come_and_go(cluster, node, names))
        note = f"rounds: {_told(times[OURS])} and {_told(times[THEIRS])}"
        figures |= _compared(f"{crowd} pods at once, all ready", times[OURS], times[THEIRS], unit="s", note=note)
    return figures


def _order(number: int) -> tuple[str, str]:
    """Who is first in a round: each as often, and between two turns of one side lie as many of the other's."""
    return (OURS, THEIRS) if number % 2 == 0 else (THEIRS, OURS)


def _compared(name: str, ours: list[float], theirs: list[float], *, unit: str, note: str) -> dict[str, Figure]:
    """The medians of both sides, and the median of ratios, by which the target is judged.

    Each ratio is that of two rounds together, in which each side was first once.
    """
    ratios = [sum(ours[at : at + 2]) / sum(theirs[at : at + 2]) for at in range(0, len(ours), 2)]
    return {
        f"{name}, p50": figure(median(ours), peer=median(theirs), unit=unit, note=f"{PEER}; {note}"),
        f"{name}, ratio": figure(median(ratios), unit="x", target=TARGET, note=f"of two rounds each: {_told(ratios)}"),
    }


async def _come_and_go(cluster: Cluster, node: str, names: list[str]) -> float:
    """Seconds from the first request until all of the pods are ready; they are gone afterwards."""
    path = f"{PODS}?labelSelector=on%3D{node}"
    began = time.perf_counter()
    await asyncio.gather(*(cluster.api.create(PODS, _pod(name, node)) for name in names))

    def all_ready(pods: list[Any]) -> bool:
        return len(pods) == len(names) and all(holds(pod, "Ready") for pod in pods)

    await eventually(lambda: cluster.api.items(path), all_ready, within=3 * WITHIN)
    took = time.perf_counter() - began
    await cluster.api.delete(path)
    await eventually(lambda: cluster.api.items(path), lambda pods: not pods, within=3 * WITHIN)
    return took


def _pod(name: str, node: str) -> dict[str, Any]:
    container = {"name": "c", "image": IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sleep", "1000"]}
    spec = {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [container]}
    own = {"enableServiceLinks": False, "automountServiceAccountToken": False}
    return {"metadata": {"name": f"{node}-{name}", "labels": {"on": node}}, "spec": {**spec, **own}}


def _sandbox_times(node: Node) -> list[float]:
    """Milliseconds that containerd took for each sandbox so far, in the order of their coming."""
    began: dict[str, datetime] = {}
    times = []
    for line in (node.home / "containerd.log").read_text().splitlines():
        if found := _RETURNS.search(line):
            times.append((_moment(found[1]) - began.pop(found[2])).total_seconds() * 1e3)
        elif found := _BEGINS.search(line):
            began[found[2]] = _moment(found[1])
    return times


def _moment(text: str) -> datetime:
    seconds, _, fraction = text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{seconds}.{fraction:0<6.6}+00:00")


def _told(times: list[float]) -> str:
    return ", ".join(f"{each:.2f}" for each in times)
