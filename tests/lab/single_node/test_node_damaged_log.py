"""M9: a damaged line of the attachment log costs at most its own record; nothing is removed and packets go on."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.support import inventory
from tests.support.sequence_stream import Stream

from weft.kernel.netlink.link import read_link
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.uapi.netlink import NETLINK_ROUTE
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.waiting import until

LINUX_AND_OVS_IN_SOAK = pytest.mark.parametrize(
    "lab", ["linux", pytest.param("ovs", marks=pytest.mark.soak)], indirect=True
)


def index_of(pod: Pod) -> int:
    """The index of the pod's interface; another one means that it was made again."""
    with NetlinkSocket(NETLINK_ROUTE, namespace=pod.namespace) as netlink:
        link = read_link(netlink, pod.attachment.ifname)
    assert link is not None, f"the interface of {pod.name} is gone"
    return link.index


async def damage_lines_of(host: Host, name: str) -> None:
    """Kill the agent and flip a bit in each line of a container, so that no record of it is left."""
    path = host.home / "data" / "attachments.log"
    marker = f'"{name}"'.encode()
    await until(lambda: marker in path.read_bytes() and b'"published":true' in path.read_bytes())
    host.kill()
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = [line[:40] + bytes([line[40] ^ 1]) + line[41:] if marker in line else line for line in lines]
    path.write_bytes(b"".join(damaged))


@LINUX_AND_OVS_IN_SOAK
async def test_M9_a_damaged_line_takes_no_pod_off(lab: NetLab) -> None:
    """The record in the middle is lost. The store knows its endpoint, so that even this pod keeps working."""
    host = await lab.host("one")
    pods = {name: await host.pod(name) for name in ("pod-a", "pod-b", "pod-c", "pod-d")}
    await inventory.wait_consistent(lab)
    indexes = {name: index_of(pod) for name, pod in pods.items()}
    others = [pod for name, pod in pods.items() if name != "pod-b"]
    streams = [Stream(one.place(), other.place(), port=7000, rate=100) for one, other in pairwise(others)]
    with streams[0], streams[1]:
        await damage_lines_of(host, "pod-b")
        await host.start()
        assert "attachment log damaged" in (host.home / "netplugin.log").read_text()
        assert await pods["pod-b"].eventually_reaches(pods["pod-d"])
        for stream in streams:
            stream.stop()
            assert await stream.missing() == []
    assert {name: index_of(pod) for name, pod in pods.items()} == indexes
    for pod in others:
        await pod.check()
    await host.start()
    assert {name: index_of(pod) for name, pod in pods.items()} == indexes
    if host.switch is not None:  # CVE-2024-2182: BFD packets of a workload are packets like others
        assert "enable" not in host.switch.configure("--columns=bfd", "list", "interface")
    for pod in pods.values():
        await pod.remove()
    await inventory.wait_consistent(lab)


@LINUX_AND_OVS_IN_SOAK
async def test_M9_a_port_that_nobody_knows_stays(lab: NetLab) -> None:
    """The store never had the endpoint: its port is left alone as long as the record may be lost."""
    host = await lab.host("one")
    known = await host.pod("known")
    await inventory.wait_consistent(lab)
    lab.master.kill()
    lost = await host.pod("unknown")
    await damage_lines_of(host, "unknown")
    await lab.master.start()
    index = index_of(lost)
    for _ in range(2):
        await host.start()
        assert index_of(lost) == index
    assert await known.eventually_reaches(await host.pod("later"))
