"""A node of a real cluster: a lab machine with containerd, kubelet and our agent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.support.machines import Machine
from tests.support.runtimes import run, run_checked

from weft.kernel.netns import NamespaceDirectory
from weft.lab.servers.processes import Child
from weft.lab.waiting import eventually

_CONTAINERD = """\
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/opt/cni/bin"
    conf_dir = "/etc/cni/net.d"
"""
# The plugin that containerd calls for every pod besides ours.
_LOOPBACK = "/usr/lib/cni/loopback"
# The address of the service in `packaging/kubernetes/dns.yaml`.
_NAME_SERVER = "10.96.0.10"
_IMAGES = ("--namespace", "k8s.io", "image")
_SOCKET = "unix:///run/containerd/containerd.sock"


class Node(Machine):
    """A machine that joins the cluster with `join`."""

    _containerd: Child | None = None
    _kubelet: Child | None = None
    _ctr = "ctr"
    _environment: Mapping[str, str] = MappingProxyType({})

    async def join(
        self,
        *,
        kubelet: Path,
        kubeconfig: Path,
        ca: Path,
        image: Path,
        name: str,
        cgroup: str,
        containerd: Path | None = None,
    ) -> None:
        """Start containerd and kubelet, and import the archive of the pod image.

        containerd's programs are this machine's own, or those of a directory.
        """
        self._image = image
        if containerd is not None:
            self._ctr = str(containerd / "ctr")
            self._environment = {"PATH": f"{containerd}:{os.environ['PATH']}"}  # so that containerd finds its shim
        plugins = self.root / "opt" / "cni" / "bin"
        plugins.mkdir(parents=True, exist_ok=True)
        shutil.copy(_LOOPBACK, plugins)
        config = self.home / "kubelet.json"
        config.write_text(json.dumps(_kubelet_config(ca=ca, cgroup=cgroup)))
        (self.home / "containerd.toml").write_text(_CONTAINERD.format(image=name))
        self._kubelet_command = [
            str(kubelet),
            f"--config={config}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            "--cert-dir=/var/lib/kubelet/pki",
        ]
        await self.start_containers()

    async def start_containers(self) -> None:
        """Restart containerd and kubelet with their existing state."""
        await self.start_containerd()
        self.start_kubelet()

    async def start_containerd(self) -> None:
        """(Re)start containerd, and return when it answers. Containers keep running."""
        _end(self._containerd)
        config = str(self.home / "containerd.toml")
        daemon = self._containerd = self.daemon(
            "containerd", "--config", config, log="containerd.log", env=self._environment
        )

        async def is_ready() -> bool:
            assert daemon.running, f"containerd on {self.name} has ended with code {daemon.exit_code}"
            return (await run(*self.command(self._ctr, "version"))).exit_code == 0

        await eventually(is_ready, bool)
        await self.import_image(self._image)

    async def import_image(self, archive: Path, *names: str) -> None:
        """Import an image under its own name and others."""
        output = await run_checked(*self.command(self._ctr, *_IMAGES, "import", str(archive)))
        own = output.split()[1]
        for name in names:
            await run_checked(*self.command(self._ctr, *_IMAGES, "tag", "--force", own, name))

    def start_kubelet(self) -> None:
        """(Re)start kubelet. Containers keep running."""
        _end(self._kubelet)
        self._kubelet = self.daemon(*self._kubelet_command, log="kubelet.log")

    def close(self) -> None:
        for child in (self._kubelet, self._containerd):
            _end(child)
        self._kubelet = self._containerd = None
        super().close()


class BareNode(Node):
    """A node without Weft, which the cluster's manifests install."""

    async def start(self) -> None:
        """Start the machine without any of our programs."""
        if await self.switch_on():
            self.tenants = NamespaceDirectory(self.root / "run" / "weft" / "netns")


def _end(child: Child | None) -> None:
    if child is not None:
        with child:
            pass


def _kubelet_config(*, ca: Path, cgroup: str) -> Mapping[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": _SOCKET,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "localStorageCapacityIsolation": False,
        "makeIPTablesUtilChains": False,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(ca)},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDomain": "cluster.local",
        "clusterDNS": [_NAME_SERVER],
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "syncFrequency": "2s",
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
    }
