"""Prints the steps of `weft lab` and runs them."""

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
    """A step of the demo did not have the result that it promises."""


class Demo:
    """Prints each step and runs it."""

    def __init__(self, console: Console, lab: NetLab) -> None:
        self.console = console
        self.lab = lab

    def heading(self, title: str, text: str = "") -> None:
        """Begin a section of the demo."""
        self.console.rule(f"[bold]{title}", align="left")
        if text:
            self.print(text)

    def print(self, text: str) -> None:
        self.console.print(text, highlight=False)

    async def run(self, line: str, *, on: Host | None = None) -> None:
        """Run one of our commands as a user would, on a host if given; `DemoFailed` if it fails."""
        prompt = f"{on.name} $" if on else "$"
        self.console.print(f"[bold green]{prompt}[/] {line}", highlight=False, soft_wrap=True)
        program, *words = line.split()
        module = {"netctl": "weft.ctl.netctl.main", "weft": "weft.cli"}[program]
        wrapper = ["weft.lab.run_in_netns", str(on.netns), str(on.boot_id)] if on else []
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *wrapper, module, *words,
            env={**os.environ, "NETMASTER": self.lab.master.url},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        # A child process, not a call: the demo runs what a user would run.
        output, _ = await asyncio.wait_for(process.communicate(), DEADLINE)
        self.console.print(output.decode(), highlight=False, markup=False, end="", soft_wrap=True)
        # `weft trace` exits with 1 for a blocked flow, which the demo shows on purpose.
        if process.returncode and not line.startswith("weft trace"):
            raise DemoFailed(f"weft lab: {line!r} failed with exit code {process.returncode}")

    async def attach(self, name: str, host: Host, tenant: str, group: str) -> Pod:
        """Attach a pod and print its address and how long ADD took."""
        began = monotonic()
        pod = await host.pod(name, tenant=tenant, network="net", group=group)
        took = (monotonic() - began) * 1000
        self.print(f"[bold green]+[/] {name} on {host.name}: {pod.address()} ({took:.0f} ms)")
        return pod
