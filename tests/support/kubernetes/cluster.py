"""A real cluster on a lab: control plane, nodes with kubelet and containerd, and our agents in the same machines."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from tests.support import inventory
from tests.support.cgroups import make_cgroup, own_cgroup
from tests.support.kubernetes.api import Api
from tests.support.kubernetes.api_server import ADMIN, ApiServer, running_api_server
from tests.support.kubernetes.documents import IMAGE, PORT
from tests.support.kubernetes.images import write_image
from tests.support.kubernetes.manifests import DNS
from tests.support.kubernetes.node import BareNode, Node
from tests.support.runtimes import make_root, run_checked

from weft.kernel.netns import Namespace
from weft.lab.netlab import NetLab
from weft.lab.servers.processes import Child
from weft.lab.traffic import NetnsAddress
from weft.lab.waiting import eventually

PODS = "/api/v1/namespaces/default/pods"

# The node that the control plane is on. It has no kubelet.
CONTROL = "control"

# Timeout for anything a cluster does, also on a busy machine.
WITHIN = 120.0


class Cluster:
    """An open cluster, without nodes yet."""

    def __init__(
        self,
        lab: NetLab,
        server: ApiServer,
        api: Api,
        *,
        programs: Path,
        containerd: Path | None,
        stack: AsyncExitStack,
    ) -> None:
        self.lab = lab
        self.server = server
        self.api = api
        self.nodes: dict[str, Node] = {}
        self.programs = programs
        self._containerd = containerd
        self._stack = stack
        self.kubeconfig = server.kubeconfig(*ADMIN)
        self._image = lab.directory / "image.tar"
        root = make_root(lab.directory / "root")
        write_image(self._image, root, name=IMAGE, command=("/bin/sleep", "infinity"))

    async def node(self, name: str, *flags: str) -> Node:
        """A new node, ready for pods; `flags` are for netplugin."""
        node = await self._add(Node, name, *_mode(self.server), *flags)
        await self.ready(name)
        return node

    async def bare_node(self, name: str) -> Node:
        """A new node without anything of ours, which therefore is not ready."""
        node = await self._add(BareNode, name)
        await eventually(lambda: self.api.find(f"/api/v1/nodes/{name}"), bool, within=WITHIN)
        return node

    async def _add(self, kind: type[Node], name: str, *flags: str) -> Node:
        cgroup = await self._stack.enter_async_context(own_cgroup(f"weft-{os.getpid()}-{name}"))
        make_cgroup(cgroup)
        node = await self.lab.add(kind, name, *flags)
        self._stack.callback(node.close)  # before its cgroup is removed, not only with the lab
        self.nodes[name] = node
        await node.join(
            kubelet=self.programs / "kubelet",
            kubeconfig=self.server.kubeconfig(f"system:node:{name}", "system:nodes"),
            ca=self.server.authority.ca,
            image=self._image,
            name=IMAGE,
            cgroup=cgroup,
            containerd=self._containerd,
        )
        return node

    async def ready(self, name: str) -> None:
        """Return when a node is ready for pods."""

        async def look() -> bool:
            node = await self.api.find(f"/api/v1/nodes/{name}")
            return node is not None and holds(node, "Ready") and not node["spec"].get("taints")

        await eventually(look, bool, within=WITHIN)

    async def kubectl(self, *words: str) -> str:
        """The output of kubectl, which must succeed."""
        kubectl = str(self.programs / "kubectl")
        return await run_checked(kubectl, f"--kubeconfig={self.kubeconfig}", *words, within=WITHIN)

    async def apply(self, *documents: Mapping[str, object]) -> None:
        """`kubectl apply`."""
        path = self.lab.directory / "applied.json"
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))
        await self.kubectl("apply", "-f", str(path))

    async def pod(self, name: str) -> Any | None:
        """A pod of the namespace `default`, or None where there is none."""
        return await self.api.find(f"{PODS}/{name}")

    async def pod_ready(self, name: str) -> Any:
        """The same once it is ready."""
        return await eventually(
            lambda: self.pod(name), lambda pod: pod is not None and holds(pod, "Ready"), within=WITHIN
        )

    async def pod_started_again(self, former: Any) -> Any:
        """A pod that was ready before, once it is ready again after a restart of its container."""

        def again(pod: Any | None) -> bool:
            return pod is not None and holds(pod, "Ready") and _restarts(pod) > _restarts(former)

        return await eventually(lambda: self.pod(former["metadata"]["name"]), again, within=WITHIN)

    async def pods_ready(self, app: str, *, count: int) -> list[Any]:
        """All pods of a Deployment, once there are so many and no others, and all are ready."""

        async def look() -> list[Any]:
            return await self.api.items(f"{PODS}?labelSelector=app%3D{app}")

        def complete(pods: list[Any]) -> bool:
            return len(pods) == count and all(holds(pod, "Ready") for pod in pods)

        return await eventually(look, complete, within=WITHIN)

    def place(self, pod: Any) -> NetnsAddress:
        """The addresses of a running pod."""
        node = self.nodes[pod["spec"]["nodeName"]]
        address = pod["status"]["podIP"]
        namespaces = sorted((node.root / "run" / "netns").iterdir())
        (path,) = [each for each in namespaces if address in inventory.addresses(each)]
        return NetnsAddress(self._stack.enter_context(Namespace.open(path)), ip_address(address))

    async def remove(self, what: str, name: str) -> None:
        """`kubectl delete`, which returns when kubelet has removed the containers."""
        await self.kubectl("delete", what, name, "--wait", "--cascade=foreground")

    async def fetch_names(self, name: str, *addresses: str, port: int = PORT) -> list[str]:
        """The names that servers at these addresses return to a pod, requested one after the other."""
        script = f"for a in {' '.join(addresses)}; do printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 10 $a {port}; done"
        answers = await self.kubectl("exec", name, "--", "sh", "-c", script)
        heads, *_ = answers.split("HTTP/1.", 1)
        assert heads == "", answers
        return [answer.rpartition("\r\n\r\n")[2].strip() for answer in answers.split("HTTP/1.")[1:]]


def _restarts(pod: Any) -> int:
    return sum(each["restartCount"] for each in pod["status"]["containerStatuses"])


def holds(document: Any, condition: str) -> bool:
    conditions = document.get("status", {}).get("conditions", ())
    return any(each["type"] == condition and each["status"] == "True" for each in conditions)


@asynccontextmanager
async def open_cluster(
    lab: NetLab, *, programs: Path, containerd: Path | None = None, bare: bool = False
) -> AsyncIterator[Cluster]:
    """A cluster whose control plane is where the lab is, from programs that `scripts/build-kubernetes` has built.

    containerd is this machine's own, or that of a directory. A `bare` cluster has nothing of ours: the lab's netmaster
    is ended.
    """
    directory = lab.directory / "kubernetes"
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            running_api_server(directory, programs=programs, address=lab.address, controlled=True)
        )
        for command in (_controller_manager(server), _scheduler(server)):
            program, *flags = command
            log = directory / f"{program}.log"
            stack.enter_context(Child([str(programs / program), *flags], log=log))
        if bare:
            lab.master.kill()
        else:
            await lab.master.start(*_mode(server))
            stack.enter_context(_agent(lab, server))
        api = await stack.enter_async_context(server.client())
        cluster = Cluster(lab, server, api, programs=programs, containerd=containerd, stack=stack)
        if not bare:
            await cluster.kubectl("apply", "-f", str(DNS))
        yield cluster


def _mode(server: ApiServer) -> tuple[str, ...]:
    """The flags of netmaster and netplugin for mode kubernetes."""
    return "--mode=kubernetes", f"--kubeconfig={server.kubeconfig('weft', 'system:masters')}"


def _agent(lab: NetLab, server: ApiServer) -> Child:
    """Our agent where the control plane is: the API server reaches pods as every node's host does."""
    home = lab.directory / CONTROL
    home.mkdir()
    flags = {
        "host": CONTROL,
        "netmaster": f"unix:{lab.store_socket}",
        "vtep-ip": lab.address,
        "ctrl-ip": lab.address,
        "run-dir": home / "run",
        "data-dir": home / "data",
        "cni-socket": home / "cni.sock",
        "node-ttl": 30,  # the machine may be busy
    }
    own = (f"--{name}={value}" for name, value in flags.items())
    return Child.python("weft.agent.main", *own, *_mode(server), log=home / "netplugin.log")


def _controller_manager(server: ApiServer) -> list[str]:
    config = server.kubeconfig("system:kube-controller-manager")
    return [
        "kube-controller-manager",
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        f"--service-account-private-key-file={server.service_accounts.key}",
        f"--root-ca-file={server.authority.ca}",
        "--use-service-account-credentials=true",  # the manager's own user may not remove a taint from a node
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
    ]


def _scheduler(server: ApiServer) -> list[str]:
    config = server.kubeconfig("system:kube-scheduler")
    return [
        "kube-scheduler",
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
    ]
