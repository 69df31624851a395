"""What a caller of the CNI socket may ask for: it fails alone, and neither stops the agent nor takes over its ports."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from weft.cni.errors import CniError
from weft.kernel.netns import Namespace
from weft.lab.netlab import NetLab
from weft.lab.waiting import DEADLINE, soon
from weft.runtime.listener import raise_open_files

# netplugin's REST, netmaster's join, store and REST, the tunnels, and what the operator names.
LISTENERS = [("tcp", 9090), ("tcp", 9997), ("tcp", 9998), ("tcp", 9999), ("udp", 4789), ("sctp", 8555)]


def mapping(protocol: str, port: int, **members: str) -> list[dict[str, object]]:
    return [{"hostPort": port, "containerPort": 80, "protocol": protocol, **members}]


async def test_M1_host_ports_of_our_own_listeners_are_refused(lab: NetLab) -> None:
    host = await lab.host("one")
    host.flags = (*host.flags, "--reserved-host-ports=9997,9998,tcp/9999,sctp/8555")
    await host.start()
    for number, (protocol, port) in enumerate(LISTENERS):
        for members in ({}, {"hostIP": "127.0.0.1"}):
            with pytest.raises(CniError, match="is reserved"):
                await host.pod(f"p{number}", portMappings=mapping(protocol, port, **members))
            host.remove_netns(f"p{number}")
    pod = await host.pod("other", portMappings=mapping("tcp", 8555))
    await pod.remove()


async def test_a_hostile_caller_stops_nobody(lab: NetLab) -> None:
    """A FIFO as CNI_NETNS (L2), silent clients, and huge or deep prevResults: the next pod starts all the same."""
    host = await lab.host("one")
    fifo = host.home / "fifo"
    os.mkfifo(fifo)
    silent = [socket.socket(socket.AF_UNIX) for _ in range(300)]
    try:
        for each in silent:
            each.connect(str(host.socket))
        deep: dict[str, object] = {}
        for _ in range(400):
            deep = {"a": deep}
        wide = {"cniVersion": "1.1.0", "ips": [{"address": "10.0.0.1/8"}] * 20_000}
        config: dict[str, object] = {"cniVersion": "1.1.0", "name": "weft", "type": "weft-cni"}
        netns = str(host.make_netns("named"))
        for previous, where, ifname in (
            (None, str(fifo), "eth0"),
            (None, "/dev/zero", "eth0"),
            (None, str(host.home), "eth0"),
            (deep, netns, "eth0"),
            (wide, str(fifo), "eth0"),
            (None, netns, "../../x"),
            (None, netns, "a" * 16),
            (None, netns, "."),
        ):
            extra: dict[str, object] = {"prevResult": previous} if previous is not None else {}
            output = await soon(
                host.call("ADD", config | extra, containerid="hostile", netns=where, ifname=ifname, path="/")
            )
            assert output.exit_code != 0 or previous is deep
        await host.call("DEL", config, containerid="hostile", netns=netns, ifname="eth0", path="/")
        one, two = await soon(host.pod("one")), await soon(host.pod("two"))
        assert await one.eventually_reaches(two)
        assert host.agent.running
    finally:
        for each in silent:
            each.close()


@pytest.mark.soak
async def test_M2_five_thousand_idle_connections_to_the_agent_leave_add_working(lab: NetLab) -> None:
    """On each of its sockets, REST and CNI, in two waves: pods start and stop, and the metrics say what was closed."""
    host = await lab.host("one")
    raise_open_files()
    with Namespace.open(host.netns) as namespace:

        def connect_all() -> list[socket.socket]:
            opened = []
            for _ in range(5000):
                opened.append(socket.create_connection(("127.0.0.1", 9090), timeout=DEADLINE))
                opened.append(socket.socket(socket.AF_UNIX))
                # A blocking socket waits, as a shim does, while the listener's backlog is full.
                opened[-1].connect(str(host.socket))
            return opened

        def metrics() -> str:
            with socket.create_connection(("127.0.0.1", 9090), timeout=DEADLINE) as connection:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: weft\r\nConnection: close\r\n\r\n")
                return connection.makefile().read()

        for wave in range(2):
            idle = await asyncio.to_thread(namespace.run, connect_all)
            try:
                one, two = await soon(host.pod(f"one{wave}")), await soon(host.pod(f"two{wave}"))
                assert await one.eventually_reaches(two)
                await soon(one.remove())
                await soon(two.remove())
                text = await asyncio.to_thread(namespace.run, metrics)
            finally:
                for each in idle:
                    each.close()
            assert 'weft_agent_cni_requests_total{result="silent",verb="unknown"}' in text
            assert re.search(r'weft_connections_closed_total\{listener="[^"]*",reason="idle"\}', text)
        assert host.agent.running


async def test_cve_2022_29178_another_user_gets_nothing_from_our_sockets(lab: NetLab) -> None:
    """CVE-2020-15257 too: no socket is abstract, where file modes and mount namespaces mean nothing."""
    host = await lab.host("one")
    attempt = f"import socket; socket.socket(socket.AF_UNIX).connect({str(host.socket)!r})"
    host.home.chmod(0o755)
    command = ["setpriv", "--reuid", "65534", "--clear-groups", "/usr/bin/python3", "-c", attempt]
    refused = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=DEADLINE, check=False)
    assert b"PermissionError" in refused.stderr
    assert stat.S_IMODE(host.socket.stat().st_mode) == 0o600
    with Namespace.open(host.netns) as namespace:
        listed = namespace.run(lambda: Path("/proc/thread-self/net/unix").read_text())
    ours = [line for line in listed.splitlines() if line.partition("@")[1]]
    assert ours == []
