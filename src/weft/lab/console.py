"""How `weft lab` tells: each step is printed and done."""

from __future__ import annotations

import asyncio
import os
import sys
from time import monotonic

from rich.console import Console

from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.waiting import DEADLINE


class DemoFailed(SystemExit):
    """The lab cannot show what it promises."""


class Demo:
    """Prints each step, and does it."""

    def __init__(self, console: Console, lab: NetLab) -> None:
        self.console = console
        self.lab = lab

    def say(self, title: str, text: str = "") -> None:
        self.console.rule(f"[bold]{title}", align="left")
        if text:
            self.tell(text)

    def tell(self, text: str) -> None:
        self.console.print(text, highlight=False)

    async def run(self, line: str, *, on: Host | None = None) -> None:
        """One of our commands, as a user would run it. `weft trace` says by its exit code whether a flow is blocked."""
        prompt = f"{on.name} $" if on else "$"
        self.console.print(f"[bold green]{prompt}[/] {line}", highlight=False, soft_wrap=True)
        program, *words = line.split()
        module = {"netctl": "weft.ctl.netctl.main", "weft": "weft.cli"}[program]
        there = ["weft.lab.run_in_netns", str(on.machine), str(on.boot_id)] if on else []
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *there, module, *words,
            env={**os.environ, "NETMASTER": self.lab.master.url},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await asyncio.wait_for(process.communicate(), DEADLINE)
        self.console.print(output.decode(), highlight=False, markup=False, end="", soft_wrap=True)
        if process.returncode and not line.startswith("weft trace"):
            raise DemoFailed(f"weft lab: {line!r} ended with code {process.returncode}")

    async def attach(self, name: str, host: Host, tenant: str, group: str) -> Pod:
        began = monotonic()
        pod = await host.pod(name, tenant=tenant, network="net", group=group)
        took = (monotonic() - began) * 1000
        self.tell(f"[bold green]+[/] {name} on {host.name}: {pod.address()} ({took:.0f} ms)")
        return pod
