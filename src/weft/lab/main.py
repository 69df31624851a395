"""`weft lab`: start a real netmaster on an embedded store and tell, command by command, what it does."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from rich.console import Console

from weft.testing.masters import MasterProcess

DEADLINE = 30.0

POLICY = (
    "netctl tenant create blue",
    "netctl network create -t blue -s 10.1.1.0/24 -g 10.1.1.254 -s6 2001:db8:1::/64 web-net",
    "netctl policy create -t blue web-only",
    "netctl policy rule-add -t blue -d in -l tcp -P 80 -p 10 web-only http",
    "netctl policy rule-add -t blue -d in -j deny -p 1 web-only rest",
    "netctl group create -t blue -p web-only web-net web",
    "netctl group create -t blue web-net clients",
    "netctl service create -t blue -s web-net -l app=web -p 80:8080:TCP shop",
)
WEB = {"app": "web"}
ENDPOINTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("web-1", "web", WEB),
    ("web-2", "web", WEB),
    ("client-1", "clients", {}),
)
LOOK = (
    "netctl endpoint ls -t blue",
    "weft trace client-1 web-1 tcp/80",
    "weft trace client-1 web-1 tcp/22",
    "netctl policy rule-rm -t blue web-only rest --preview",
)
AFTER_THE_KILL = ("netctl endpoint ls -t blue", "netctl service ls -t blue")


class Story:
    """Prints each step and checks it: a lab that shows something untrue ends with an error."""

    def __init__(self, console: Console, master: MasterProcess) -> None:
        self._console = console
        self._master = master

    def say(self, text: str) -> None:
        self._console.rule(f"[bold]{text}", align="left")

    async def run(self, line: str, *, may_refuse: bool = False) -> None:
        """Run one of our commands as a user would."""
        self._console.print(f"[bold green]$[/] {line}", highlight=False, soft_wrap=True)
        program, *words = line.split()
        module = {"netctl": "weft.ctl.main", "weft": "weft.ctl.weft"}[program]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *words,
            env={**os.environ, "NETMASTER": self._master.url},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await asyncio.wait_for(process.communicate(), DEADLINE)
        self._console.print(output.decode(), highlight=False, markup=False, end="", soft_wrap=True)
        if process.returncode and not may_refuse:
            raise SystemExit(f"weft lab: {line!r} ended with code {process.returncode}")

    async def attach(self, name: str, group: str, labels: dict[str, str]) -> None:
        """Create an endpoint through the plugin call; agents will do so by themselves."""
        self._console.print(f"[bold green]+[/] endpoint {name} in group {group}", highlight=False)
        where = {"TenantName": "blue", "NetworkName": "web-net", "EndpointID": name, "ServiceName": group}
        event = {"Event": "start", "Tenant": "blue", "EndpointID": name, "Labels": labels}
        async with aiohttp.ClientSession(self._master.url, raise_for_status=True) as session:
            await session.post("/plugin/createEndpoint", json=where)
            await session.post("/plugin/updateEndpoint", json=event)


async def tell(console: Console, directory: Path) -> None:
    """The whole story."""
    async with MasterProcess(directory) as master:
        story = Story(console, master)
        story.say("One command starts netmaster on an embedded store")
        console.print(f"netmaster is ready at {master.url}", highlight=False)
        story.say("A tenant with a network, groups, a policy and a service")
        for line in POLICY:
            await story.run(line)
        for name, group, labels in ENDPOINTS:
            await story.attach(name, group, labels)
        story.say("Who would reach whom, and why")
        for line in LOOK:
            await story.run(line, may_refuse=line.startswith("weft trace"))
        story.say("kill -9, start again: nothing is lost")
        await master.start()
        for line in AFTER_THE_KILL:
            await story.run(line)


def main(argv: Sequence[str]) -> int:
    """Show Weft at work; everything is cleaned up at the end, after Ctrl-C too."""
    parser = argparse.ArgumentParser(prog="weft lab", description="Show Weft at work on this machine.")
    parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="weft-lab-") as directory:
        try:
            asyncio.run(tell(Console(), Path(directory)))
        except KeyboardInterrupt:
            return 130
    return 0
