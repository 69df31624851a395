"""The calls of kubelet with containerd, and others', replayed to the letter (cni 5)."""

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
    """One call; the order of the arguments is another each time."""
    args = [f"{key}={value}" for key, value in {**ARGS, "K8S_POD_INFRA_CONTAINER_ID": sandbox}.items()]
    random.shuffle(args)
    named = {"containerid": sandbox, "ifname": "eth0", "netns": netns, "args": ";".join(args), "path": "/usr/lib/cni"}
    return await machine.host.call(verb, CONFIG | members, **named)


async def test_a_pod_comes_and_is_deleted_five_times(machine: Machine) -> None:
    """The first DEL knows all, the others neither namespace nor result."""
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
    await machine.nothing_left()


async def test_an_add_that_failed_is_deleted_at_once(machine: Machine) -> None:
    """The namespace is still there, and there is no result; the next sandbox of the same pod is a new one."""
    netns = str(machine.host.make_netns("pod"))
    refused = await call(machine, "ADD", netns, ipam={"type": "host-local"})
    error = CniError.decode(refused.stdout)
    assert error is not None
    assert error.code == Code.UNSUPPORTED_FIELD
    undone = await call(machine, "DEL", netns)
    assert (undone.exit_code, undone.stdout) == (0, b"")
    await machine.nothing_left()
    machine.host.remove_netns("pod")
    again = "7e1d" * 16
    netns = str(machine.host.make_netns("again"))
    added = await call(machine, "ADD", netns, sandbox=again)
    assert added.exit_code == 0, added
    late = await call(machine, "DEL", "")
    assert (late.exit_code, late.stdout) == (0, b"")
    assert len(await machine.held()) == 1, "a late DEL of the former sandbox took the new one off"
    assert (await call(machine, "DEL", netns, sandbox=again)).exit_code == 0
    await machine.nothing_left()


async def test_status_of_containerd_2(machine: Machine) -> None:
    """It asks whenever kubelet does, without naming anything, and takes the answer for the node's network."""
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
    """Before anything else, with dummies for all names; also while the agent is away."""
    machine.host.kill()
    dummies = dict.fromkeys(("netns", "ifname", "path"), "dummy")
    probed = await machine.host.call("VERSION", {"cniVersion": "1.0.0"}, **dummies)
    assert probed.exit_code == 0
    assert "1.0.0" in json.loads(probed.stdout)["supportedVersions"]
