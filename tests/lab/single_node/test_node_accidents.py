"""No ordinary command opens traffic by accident (UX1, UX2): each is tried with packets before and after."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from tests.support.modes import ALL_IN_SOAK

from weft.lab.netlab import NetLab
from weft.lab.servers.processes import DEADLINE
from weft.lab.traffic import eventually_reaches, never_reaches

# Commands that switched the policy off, or that a user may believe to change nothing, with their exit codes.
ACCIDENTS = {
    "group create -t blue web-net web --wait=30": 0,
    "group create -t blue web-net web --networkprofile gold --wait=30": 0,
    "tenant create blue --wait=30": 0,
    "policy create -t blue web-only --wait=30": 0,
    "policy create -t blue web-only --dry-run": 0,
    "policy create -t blue web-only --mode audit --dry-run": 0,
    "policy rule-rm -t blue web-only rest --dry-run": 0,
    "group create -t blue --no-policy web-net web --preview": 0,
    "group create -t blue --no-policy web-net web --wait=30": 6,
    "group create -t blue -p all web-net web --wait=30": 6,
    "policy create -t blue web-only --mode audit --wait=30": 6,
}


async def run(*words: str) -> subprocess.CompletedProcess[str]:
    # On a thread: this process has a part in the lab, and must go on while a command waits for the nodes.
    return await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", *words], capture_output=True, text=True, check=False, timeout=DEADLINE
    )


async def netctl(lab: NetLab, line: str) -> subprocess.CompletedProcess[str]:
    return await run("weft.ctl.netctl.main", "--netmaster", lab.master.url, *line.split())


async def weft_trace(lab: NetLab, *words: str) -> subprocess.CompletedProcess[str]:
    return await run("weft.cli", "trace", "--netmaster", lab.master.url, *words)


@ALL_IN_SOAK
async def test_UX1_UX2_UX3_no_command_opens_traffic_by_accident(lab: NetLab) -> None:
    for line in (
        "tenant create blue",
        f"network create -t blue -e {lab.netmode} -s 10.1.1.0/24 -g 10.1.1.254 web-net",
        "netprofile create -t blue gold -b 1gbps",
        "policy create -t blue all",
        "policy create -t blue web-only",
        "policy rule-add -t blue -d in -l tcp -P 80 -p 10 web-only http",
        "policy rule-add -t blue -d in -j deny web-only rest",
        "group create -t blue -p web-only web-net web",
    ):
        done = await netctl(lab, line)
        assert (done.returncode, done.stdout.endswith(" created\n")) == (0, True), done
    host = await lab.host("one")
    web = (await host.pod("web", tenant="blue", group="web")).place(4)
    other = (await host.pod("other", tenant="blue", network="web-net")).place(4)
    assert await eventually_reaches(other, web, port=80)
    for line, code in ACCIDENTS.items():
        done = await netctl(lab, line)
        assert done.returncode == code, (line, done)
        assert "--force" in done.stderr or code == 0
        assert await never_reaches(other, web, port=22), line
    # UX3: by address in another tenant than `default`: the packet is dropped, and the trace says so.
    traced = await weft_trace(lab, str(other.address), str(web.address), "tcp/22")
    assert (traced.returncode, "BLOCKED" in traced.stdout) == (1, True), traced
    unused = await weft_trace(lab, str(other.address), "10.1.1.250", "tcp/22")
    assert (unused.returncode, unused.stdout) == (3, ""), unused
    # With --force it is done, and said.
    forced = await netctl(lab, "group create -t blue --no-policy --force web-net web --wait=30")
    assert forced.stdout.startswith("blue:web changed: policies -web-only\nopens: "), forced
    assert await eventually_reaches(other, web, port=22)
