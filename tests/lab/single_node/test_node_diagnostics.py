"""The agent's REST API, Contiv's CNI socket, `weft doctor`, `weft capture` and `weft shell` on real nodes."""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.modes import ON_ALL

from weft.kernel.netns import Namespace
from weft.lab.hosts import Host
from weft.lab.netlab import NetLab
from weft.lab.servers.processes import DEADLINE
from weft.lab.waiting import eventually

WEFT = (sys.executable, "-m", "weft.cli")
NETCTL = (sys.executable, "-m", "weft.ctl.netctl.main")


async def run_on(host: Host, *command: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command on a host."""

    def run() -> subprocess.CompletedProcess[bytes]:
        with Namespace.open(host.netns) as machine:
            return machine.run(lambda: subprocess.run(command, capture_output=True, timeout=DEADLINE, check=False))

    return await asyncio.to_thread(run)


async def request_agent(host: Host, path: str, *, method: str = "GET") -> tuple[int, str]:
    """Status and body of the agent's answer."""

    def request() -> tuple[int, str]:
        try:
            prepared = urllib.request.Request(f"http://127.0.0.1:9090{path}", method=method)
            with urllib.request.urlopen(prepared, timeout=DEADLINE) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def run() -> tuple[int, str]:
        with Namespace.open(host.netns) as machine:
            return machine.run(request)

    return await asyncio.to_thread(run)


async def driver(host: Host) -> dict[str, Any]:
    status, body = await request_agent(host, "/inspect/driver")
    assert status == 200, body
    shown: dict[str, Any] = json.loads(body)
    return shown


async def doctor(host: Host) -> tuple[int, str]:
    done = await run_on(host, *WEFT, "doctor", "--timeout", "5")
    return done.returncode, done.stdout.decode()


async def test_rest_describes_the_node(lab: NetLab) -> None:
    """contiv 6.7, metrics, liveness and readiness."""
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    pod, other = await asyncio.gather(one.pod("a"), two.pod("b"))
    shown = await driver(one)
    assert (shown["node"], shown["mode"], shown["datapath"]) == ("one", "cni", "linux")
    assert [(port["endpointID"], port["ipAddress"], port["stage"]) for port in shown["ports"]] == [
        ("a", str(pod.address()), "attached")
    ]
    assert [netns["tenant"] for netns in shown["tenantNamespaces"]] == ["default"]
    assert shown["tenantNamespaces"][0]["ports"] == [shown["ports"][0]["device"]]
    assert shown["peers"] == [{"node": "two", "vtepIp": two.address, "ctrlIp": two.address, "state": "reachable"}]
    assert (shown["ready"], shown["inconsistencies"], shown["addressBlocks"]) == (True, [], 1)
    assert await request_agent(one, "/readyz") == (200, '{"ready":true,"reasons":[]}')
    assert (await request_agent(one, "/healthz"))[0] == 200
    _, metrics = await request_agent(one, "/metrics")
    assert 'weft_agent_cni_requests_total{result="done",verb="ADD"} 1.0' in metrics
    assert 'weft_agent_cni_request_duration_seconds_count{verb="ADD"} 1.0' in metrics
    assert 'weft_agent_attachments{stage="attached"} 1.0' in metrics
    assert "weft_agent_store_connected 1.0" in metrics
    assert 'weft_agent_peers{state="reachable"} 1.0' in metrics
    status, body = await request_agent(one, "/inspect/bgp")
    assert (status, json.loads(body)["code"]) == (501, "not-available")
    assert (await request_agent(one, "/nonsense"))[0] == 404

    assert await request_agent(one, "/debug/reclaimEndpoint/b", method="DELETE") == (
        404,
        """{"code":"not-found","message":"endpoint 'b' is not on this node","field":"","details":{}}""",
    )
    assert (await request_agent(one, "/debug/reclaimEndpoint/a", method="DELETE"))[0] == 200
    assert (await driver(one))["ports"] == []
    assert [each["endpointID"] for each in (await lab.rest.get("endpoints")).accepted()] == [other.name]


async def test_a_partitioned_node_is_not_ready_and_shown_unreachable(lab: NetLab) -> None:
    """T4: liveness is only a status."""
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    await lab.partition(two)

    async def not_ready() -> bool:
        status, body = await request_agent(two, "/readyz")
        return status == 503 and "the store is unreachable" in json.loads(body)["reasons"]

    async def state_of_two() -> str:
        return str(next(peer["state"] for peer in (await driver(one))["peers"] if peer["node"] == "two"))

    async def listed() -> str:
        done = await asyncio.to_thread(
            subprocess.run,
            [*NETCTL, "--netmaster", lab.master.url, "node", "ls"],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=True,
        )
        return next(line for line in done.stdout.splitlines() if line.startswith("two "))

    async def is_unreachable() -> bool:
        return await state_of_two() == "unreachable" and "Unreachable since" in await listed()

    async def is_ready() -> bool:
        return await state_of_two() == "reachable" and (await listed()).endswith("Ready")

    await eventually(not_ready, bool)
    await eventually(is_unreachable, bool)
    lab.heal(two)
    await eventually(is_ready, bool)
    await two.ready()


async def test_contiv_cni_requests_are_served(lab: NetLab) -> None:
    """contiv 8.2: the same operations as CNI, in Contiv's request format."""
    socket = lab.directory / "contiv.sock"
    host = await lab.host("one", "--contiv-socket", str(socket))
    netns = host.make_netns("c0ffee")
    pod = {
        "K8S_POD_NAME": "web",
        "K8S_POD_NAMESPACE": "shop",
        "K8S_POD_INFRA_CONTAINER_ID": "c0ffee",
        "CNI_NETNS": str(netns),
        "CNI_IFNAME": "eth0",
    }
    assert socket.stat().st_mode & 0o777 == 0o600

    async def call(action: str, body: str, *flags: str) -> tuple[int, Any]:
        command = ["curl", "-sS", "-w", "\n%{http_code}", "--unix-socket", str(socket), "-d", body, *flags]
        done = await run_on(host, *command, f"http://contiv/{action}")
        answer, _, status = done.stdout.decode().rpartition("\n")
        return int(status), json.loads(answer)

    as_json = ("-H", "Content-Type: application/json")
    status, answer = await call("ContivCNI.AddPod", json.dumps(pod), *as_json)
    assert status == 200
    assert set(answer) == {"endpointid", "ipaddress"}
    (port,) = (await driver(host))["ports"]
    assert (answer["endpointid"], answer["ipaddress"]) == ("c0ffee", f"{port['ipAddress']}/16")
    assert port["containerName"] == "shop/web"
    status, answer = await call("ContivCNI.AddPod", json.dumps(pod), *as_json)
    assert (status, answer["result"]) == (500, 1)
    assert "already attached" in answer["errmsg"]

    assert (await call("ContivCNI.AddPod", json.dumps(pod)))[0] == 415
    assert (await call("ContivCNI.AddPod", "[", *as_json))[0] == 400
    assert (await call("ContivCNI.AddPod", json.dumps(pod | {"K8S_POD_NAME": "a;IP=10.0.0.1"}), *as_json))[0] == 400
    assert (await call("ContivCNI.AddPod", "", "-X", "PUT", *as_json))[0] == 405
    assert (await call("ContivCNI.Restart", "{}", *as_json))[0] == 404
    for _ in range(2):
        assert await call("ContivCNI.DelPod", json.dumps(pod), *as_json) == (200, {})
    assert (await driver(host))["ports"] == []


async def test_doctor_reports_faults(lab: NetLab) -> None:
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    await asyncio.gather(one.pod("a"), two.pod("b"))
    code, report = await doctor(one)
    assert code == 0, report
    assert "one is ready with 1 workloads" in report
    assert "path MTU ok: packets of 1500 bytes reach 192.0.2.2" in report

    with one.tenants.open("default") as netns:
        netns.write_sysctls({"net/ipv4/ip_forward": "0"})
        pair = ["ip", "link", "add", "wpleaked", "type", "veth", "peer", "name", "other"]
        netns.run(lambda: subprocess.run(pair, check=True, timeout=DEADLINE))
    await asyncio.to_thread(
        subprocess.run, ["ip", "link", "set", two.underlay_veth, "mtu", "1400"], check=True, timeout=DEADLINE
    )
    code, report = await doctor(one)
    assert code == 1
    assert "net/ipv4/ip_forward is 0, not 1" in report
    assert "device wpleaked of tenant default belongs to no attachment" in report
    assert "packets of 1500 bytes do not reach 192.0.2.2" in report

    one.kill()
    done = await run_on(one, *WEFT, "doctor", "--json")
    found = {check["name"]: check["health"] for check in json.loads(done.stdout)}
    assert (done.returncode, found) == (1, {"kernel": "ok", "firewall": "ok", "networks": "ok", "agent": "failed"})


@ON_ALL
async def test_capture_and_shell_run_in_the_tenant_netns(lab: NetLab, tmp_path: Path) -> None:
    """They also work where host-side interfaces are OVS ports outside the tenant netns."""
    host = await lab.host("one")
    a, b = await asyncio.gather(host.pod("a"), host.pod("b"))
    file = tmp_path / "a.pcap"
    capture = asyncio.create_task(run_on(host, *WEFT, "capture", "lab/a", "--write", str(file), "--count", "4"))

    async def has_captured() -> bool:
        assert await a.eventually_reaches(b)
        return capture.done()

    await eventually(has_captured, bool)
    done = await capture
    assert done.returncode == 0, done.stderr
    data = file.read_bytes()
    assert struct.unpack_from("=IHH", data) == (0xA1B23C4D, 2, 4)
    lengths, has_address = [], []
    at = 24
    while at < len(data):
        captured_length = struct.unpack_from("=IIII", data, at)[2]
        lengths.append(captured_length)
        has_address.append(a.address().packed in data[at + 16 : at + 16 + captured_length])
        at += 16 + captured_length
    assert len(lengths) == 4
    assert any(has_address), "not only the kernel's own multicast packets of a new link"

    run_dir = ("--datapath", lab.datapath, "--run-dir", str(host.home / "run"))
    seen = await run_on(host, *WEFT, "shell", *run_dir, "default", "--", "ip", "-j", "link")
    devices = {link["ifname"] for link in json.loads(seen.stdout)}
    ports = {port["device"] for port in (await driver(host))["ports"]}
    assert (ports if lab.datapath == "linux" else {"wl0", "wx0"}) < devices
    assert (await run_on(host, *WEFT, "shell", *run_dir, "default", "--", "sh", "-c", "exit 7")).returncode == 7
    absent = await run_on(host, *WEFT, "shell", *run_dir, "absent", "--", "true")
    assert absent.returncode == 2
    assert b"tenant absent has no workload on this machine" in absent.stderr
    unknown = await run_on(host, *WEFT, "capture", "nonsense", "--write", str(file))
    assert unknown.returncode == 2
    assert b"it has a, b" in unknown.stderr
