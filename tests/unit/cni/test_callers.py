"""The calls of real runtimes, as a plugin that only wrote them down saw them (cni 5)."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from weft.cni.request import Add, Del, Gc, Request, Status, Version, parse_request
from weft.cni.versions import encode_versions

SANDBOX = "5f3c" * 16
KUBELET_NETNS = "/var/run/netns/cni-3f2e8f0e-0d1b-4a52-8c1e-9a6d5b3e7c21"
KUBELET_ARGS = {
    "IgnoreUnknown": "1",
    "K8S_POD_NAMESPACE": "default",
    "K8S_POD_NAME": "hp",
    "K8S_POD_INFRA_CONTAINER_ID": SANDBOX,
    "K8S_POD_UID": "8a0e1c52-7f0f-4a8e-bb56-0f1d0f8f5d11",
}
ANNOTATIONS = {"kubernetes.io/config.source": "api", "orch/net": "green"}
KUBELET_RUNTIME = {"io.kubernetes.cri.pod-annotations": ANNOTATIONS}
PODMAN_NETNS = "/run/netns/netns-1d2e3f40-1c2b-3a49-5867-768594a3b2c1"
PODMAN_ARGS = "IgnoreUnknown=1;K8S_POD_NAME=pc2;MAC=02:11:22:33:44:55;IP=10.87.0.77"
PODMAN_RUNTIME = {"aliases": {"weft": ["al1", "5f3c5f3c5f3c"]}}
RESULT = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "wp1"}, {"name": "eth0", "mac": "02:02:0a:01:00:05", "sandbox": KUBELET_NETNS}],
    "ips": [{"interface": 1, "address": "10.1.0.5/16", "gateway": "10.1.0.1"}],
    "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}],
    "dns": {},
}


def call(verb: str, container: str, netns: str, args: str = "", **members: Any) -> Request:
    """What we make of a call; libcni sets every variable, if only to nothing, and leaves `capabilities` in."""
    environment = {
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": container,
        "CNI_NETNS": netns,
        "CNI_ARGS": args,
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/opt/cni/bin:/usr/lib/cni",
    }
    network = {"cniVersion": "1.0.0", "name": "weft", "type": "weft-cni", "capabilities": {"ips": True}}
    return parse_request(environment, json.dumps(network | members).encode())


def kubelet_args(seed: int) -> str:
    """Their order is another each time."""
    pairs = [f"{key}={value}" for key, value in KUBELET_ARGS.items()]
    random.Random(seed).shuffle(pairs)
    return ";".join(pairs)


@pytest.mark.parametrize("seed", range(8))
def test_add_of_kubelet_with_containerd(seed: int) -> None:
    request = call("ADD", SANDBOX, KUBELET_NETNS, kubelet_args(seed), runtimeConfig=KUBELET_RUNTIME)
    assert isinstance(request, Add)
    assert (request.arguments.pod_namespace, request.arguments.pod_name) == ("default", "hp")
    assert (request.arguments.pod_sandbox, request.arguments.pod_uid) == (SANDBOX, KUBELET_ARGS["K8S_POD_UID"])
    assert request.capabilities.annotations == ANNOTATIONS


def test_five_dels_of_kubelet_with_containerd() -> None:
    """The first knows everything; the others come within two seconds and know neither namespace nor result."""
    first = call("DEL", SANDBOX, KUBELET_NETNS, kubelet_args(0), runtimeConfig=KUBELET_RUNTIME, prevResult=RESULT)
    later = [call("DEL", SANDBOX, "", kubelet_args(seed), runtimeConfig=KUBELET_RUNTIME) for seed in range(1, 5)]
    assert isinstance(first, Del)
    assert first.netns == KUBELET_NETNS
    for each in later:
        assert isinstance(each, Del)
        assert (each.attachment, each.netns) == (first.attachment, "")


def test_status_of_containerd_2() -> None:
    assert isinstance(call("STATUS", "", "", cniVersion="1.1.0"), Status)


def test_add_of_ctr_and_del_of_a_container_that_is_gone() -> None:
    added = call("ADD", "default-t2", "/proc/4711/ns/net")
    gone = call("DEL", "default-t2", "", prevResult=RESULT)
    assert isinstance(added, Add)
    assert isinstance(gone, Del)
    assert added.attachment == gone.attachment


def test_podman_asks_for_versions_with_dummies() -> None:
    environment = {"CNI_COMMAND": "VERSION", "CNI_NETNS": "dummy", "CNI_IFNAME": "dummy", "CNI_PATH": "dummy"}
    stdin = b'{"cniVersion":"1.0.0"}'
    assert isinstance(parse_request(environment, stdin), Version)
    assert "1.0.0" in json.loads(encode_versions(stdin))["supportedVersions"]


def test_add_and_del_of_podman() -> None:
    added = call("ADD", SANDBOX, PODMAN_NETNS, PODMAN_ARGS, runtimeConfig=PODMAN_RUNTIME)
    assert isinstance(added, Add)
    assert [str(each) for each in added.capabilities.addresses] == ["10.87.0.77"]
    assert (added.capabilities.mac, added.capabilities.aliases) == ("02:11:22:33:44:55", ("al1", "5f3c5f3c5f3c"))
    gone = call("DEL", SANDBOX, PODMAN_NETNS, PODMAN_ARGS, runtimeConfig=PODMAN_RUNTIME, prevResult=RESULT)
    assert isinstance(gone, Del)
    assert gone.attachment == added.attachment


def test_gc_of_cnitool_comes_without_a_list() -> None:
    """C-097: so nothing may be removed."""
    request = call("GC", "", "", cniVersion="1.1.0")
    assert isinstance(request, Gc)
    assert request.valid is None
