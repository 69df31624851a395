"""Recorded CNI calls of kubelet with containerd, and of podman, replayed exactly (cni 5)."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from tests.support import inventory

from weft.cni.errors import CniError, Code
from weft.lab.cni.libcni import Output

if TYPE_CHECKING:
    from tests.e2e.conftest import Machine

SANDBOX = "5f3c" * 16
ARGS = {
    "IgnoreUnknown": "1",
    "K8S_POD_NAMESPACE": "default",
    "K8S_POD_NAME": "hp",
    "K8S_POD_INFRA_CONTAINER_ID": SANDBOX,
    "K8S_POD_UID": "8a0e1c52-7f0f-4a8e-bb56-0f1d0f8f5d11",
}
CONFIG = {
    "cniVersion": "1.0.0",
    "name": "weft",
    "type": "weft-cni",
    "runtimeConfig": {"io.kubernetes.cri.pod-annotations": {"kubernetes.io/config.source": "api"}},
}


async def call(machine: Machine, verb: str, netns: str, *, sandbox: str = SANDBOX, **members: object) -> Output:
    """One call; the order of CNI_ARGS changes each time."""
    args = [f"{key}={value}" for key, value in {**ARGS, "K8S_POD_INFRA_CONTAINER_ID": sandbox}.items()]
    random.shuffle(args)
    named = {"containerid": sandbox, "ifname": "eth0", "netns": netns, "args": ";".join(args), "path": "/usr/lib/cni"}
    return await machine.host.call(verb, CONFIG | members, **named)


async def test_a_pod_is_added_once_and_deleted_five_times(machine: Machine) -> None:
    """The first DEL has all arguments, the others neither namespace nor result."""
    netns = machine.host.make_netns("pod")
    added = await call(machine, "ADD", str(netns))
    assert added.exit_code == 0, added
    assert "eth0" in inventory.devices(netns)
    first = await call(machine, "DEL", str(netns), prevResult=json.loads(added.stdout))
    assert (first.exit_code, first.stdout) == (0, b"")
    assert "eth0" not in inventory.devices(netns)
    machine.host.remove_netns("pod")
    for _ in range(4):
        later = await call(machine, "DEL", "")
        assert (later.exit_code, later.stdout) == (0, b"")
    await machine.wait_until_clean()


async def test_del_right_after_a_failed_add(machine: Machine) -> None:
    """The namespace exists, but there is no result; the pod's next sandbox is a new container."""
    netns = str(machine.host.make_netns("pod"))
    refused = await call(machine, "ADD", netns, ipam={"type": "host-local"})
    error = CniError.decode(refused.stdout)
    assert error is not None
    assert error.code == Code.UNSUPPORTED_FIELD
    undone = await call(machine, "DEL", netns)
    assert (undone.exit_code, undone.stdout) == (0, b"")
    await machine.wait_until_clean()
    machine.host.remove_netns("pod")
    again = "7e1d" * 16
    netns = str(machine.host.make_netns("again"))
    added = await call(machine, "ADD", netns, sandbox=again)
    assert added.exit_code == 0, added
    late = await call(machine, "DEL", "")
    assert (late.exit_code, late.stdout) == (0, b"")
    assert len(await machine.used_addresses()) == 1, "a late DEL of the former sandbox detached the new one"
    assert (await call(machine, "DEL", netns, sandbox=again)).exit_code == 0
    await machine.wait_until_clean()


async def test_status_of_containerd_2(machine: Machine) -> None:
    """It calls STATUS without a container, and reports the result as the node's network readiness."""
    config = {**CONFIG, "cniVersion": "1.1.0"}
    nothing = {"containerid": "", "ifname": "", "netns": "", "args": "", "path": "/opt/cni/bin"}
    ready = await machine.host.call("STATUS", config, **nothing)
    assert (ready.exit_code, ready.stdout) == (0, b"")
    machine.host.kill()
    away = CniError.decode((await machine.host.call("STATUS", config, **nothing)).stdout)
    assert away is not None
    assert away.code == Code.UNAVAILABLE
    await machine.host.start()
    assert (await machine.host.call("STATUS", config, **nothing)).exit_code == 0


async def test_version_probe_of_podman(machine: Machine) -> None:
    """The first call, with dummy arguments; it also works while the agent is down."""
    machine.host.kill()
    dummies = dict.fromkeys(("netns", "ifname", "path"), "dummy")
    probed = await machine.host.call("VERSION", {"cniVersion": "1.0.0"}, **dummies)
    assert probed.exit_code == 0
    assert "1.0.0" in json.loads(probed.stdout)["supportedVersions"]
