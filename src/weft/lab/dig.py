"""DNS queries by `dig` from inside a network namespace."""

from __future__ import annotations

import asyncio
import subprocess

from weft.kernel.netns import Namespace
from weft.lab.waiting import DEADLINE


async def dig(namespace: Namespace, *question: str, server: str) -> list[str]:
    """What `dig +short` prints, sorted. Sends one query and never retries."""
    return sorted((await dig_in_full(namespace, "+short", *question, server=server)).splitlines())


async def dig_in_full(namespace: Namespace, *question: str, server: str) -> str:
    """The full output of `dig`. Sends one query and never retries."""
    # +tries=1: a retry would hide a lost query.
    command = ["dig", f"@{server}", "+tries=1", f"+time={DEADLINE:.0f}", *question]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE, check=False)

    # A thread enters the namespace and forks there; the event loop's thread must not.
    done = await asyncio.to_thread(namespace.run, run)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
