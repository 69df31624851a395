"""Questions about names, asked by `dig` from inside a network namespace."""

from __future__ import annotations

import asyncio
import subprocess

from weft.kernel.netns import Namespace
from weft.lab.waiting import DEADLINE


async def dig(namespace: Namespace, *question: str, server: str) -> list[str]:
    """What `dig +short` prints, sorted; an answer must come at the first try."""
    return sorted((await dig_in_full(namespace, "+short", *question, server=server)).splitlines())


async def dig_in_full(namespace: Namespace, *question: str, server: str) -> str:
    """All that `dig` prints; an answer must come at the first try."""
    command = ["dig", f"@{server}", "+tries=1", f"+time={DEADLINE:.0f}", *question]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE, check=False)

    done = await asyncio.to_thread(namespace.run, run)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
