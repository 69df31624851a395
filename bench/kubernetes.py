"""A real Kubernetes cluster: one node with our plugin, and one with Debian's `bridge` and `host-local`.

Otherwise both nodes are the same, with kubelet and containerd. Pods are created in the order ours, peer, peer, ours.
The ratio is the median over groups of four neighbours in time, because the machine's speed varies more slowly. The
duration of a sandbox is from containerd's log. Services are measured without kubelets (`bench.kube_services`).
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
from tests.support.runtimes import mount_private_directories

from bench import kube_services
from bench.figures import Figure, Skipped, figure
from weft.lab.namespaces import private_namespaces
from weft.lab.netlab import open_lab
from weft.lab.waiting import eventually

CHECKOUT = Path(__file__).parents[1]
OURS, THEIRS = "ours", "theirs"
# Pods created one at a time on each node; the first ones have cold caches.
ALONE, NOT_COUNTED = 24, 2
# Concurrently created pods, and rounds.
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
    with private_namespaces():
        mount_private_directories()
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
    """Make containerd call the peer's plugins: it uses the first configuration list."""
    for plugin in _PLUGINS:
        (node.root / "opt/cni/bin" / plugin).write_bytes((_FOLDER / plugin).read_bytes())
        (node.root / "opt/cni/bin" / plugin).chmod(0o755)
    (node.root / "etc/cni/net.d/00-theirs.conflist").write_text(json.dumps(_BRIDGE))


async def _measure_alone(cluster: Cluster) -> dict[str, Figure]:
    """One pod at a time, alternating between the nodes."""
    for number in range(ALONE + NOT_COUNTED):
        for node in _order(number):
            await _create_and_delete(cluster, node, [f"alone-{number}"])
    ours, theirs = (_sandbox_times(cluster.nodes[node])[NOT_COUNTED:] for node in (OURS, THEIRS))
    return _compared("RunPodSandbox", ours, theirs, unit="ms", note=f"{ALONE} each, by containerd's log")


async def _measure_together(cluster: Cluster) -> dict[str, Figure]:
    """Many concurrent pods, on one node and then on the other."""
    figures: dict[str, Figure] = {}
    for crowd, rounds in CROWDS.items():
        times: dict[str, list[float]] = {OURS: [], THEIRS: []}
        for number in range(rounds):
            for node in _order(number):
                names = [f"crowd-{each}" for each in range(crowd)]
                times[node].append(await _create_and_delete(cluster, node, names))
        note = f"rounds: {_format_times(times[OURS])} and {_format_times(times[THEIRS])}"
        figures |= _compared(f"{crowd} pods at once, all ready", times[OURS], times[THEIRS], unit="s", note=note)
    return figures


def _order(number: int) -> tuple[str, str]:
    """The order of nodes in a round: ABBA."""
    return (OURS, THEIRS) if number % 2 == 0 else (THEIRS, OURS)


def _compared(name: str, ours: list[float], theirs: list[float], *, unit: str, note: str) -> dict[str, Figure]:
    """The medians of both sides, and the median ratio, which is compared with the target.

    Each ratio is of two rounds together, in which each side was first once.
    """
    ratios = [sum(ours[at : at + 2]) / sum(theirs[at : at + 2]) for at in range(0, len(ours), 2)]
    return {
        f"{name}, p50": figure(median(ours), peer=median(theirs), unit=unit, note=f"{PEER}; {note}"),
        f"{name}, ratio": figure(
            median(ratios), unit="x", target=TARGET, note=f"of two rounds each: {_format_times(ratios)}"
        ),
    }


async def _create_and_delete(cluster: Cluster, node: str, names: list[str]) -> float:
    """Seconds from the first request until all pods are ready; they are deleted afterwards."""
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
    """Milliseconds that containerd took for each sandbox so far, in order."""
    began: dict[str, datetime] = {}
    times = []
    for line in (node.home / "containerd.log").read_text().splitlines():
        if found := _RETURNS.search(line):
            times.append((_parse_time(found[1]) - began.pop(found[2])).total_seconds() * 1e3)
        elif found := _BEGINS.search(line):
            began[found[2]] = _parse_time(found[1])
    return times


def _parse_time(text: str) -> datetime:
    seconds, _, fraction = text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{seconds}.{fraction:0<6.6}+00:00")


def _format_times(times: list[float]) -> str:
    return ", ".join(f"{each:.2f}" for each in times)
