"""`weft up`: runs netmaster, netplugin and netdns on this machine until one of them ends."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path

# Time between SIGTERM and SIGKILL.
_GRACE_S = 10.0

_MASTER_FLAGS = ("--external-address", "--default-subnet")
_AGENT_FLAGS = ("--host", "--vtep-ip", "--ctrl-ip", "--cni-socket", "--contiv-socket", "--rest-address", "--run-dir")
_COMMON_FLAGS = ("--data-dir", "--log-level", "--mode")
_DNS_FLAGS = ("--run-dir", "--log-level")


def main(argv: Sequence[str]) -> int:
    """Return 0 after SIGTERM or SIGINT, else the exit code of the program that ended first; the others end too."""
    parser = argparse.ArgumentParser(
        prog="weft up",
        description="Run netmaster, netplugin and netdns on this machine. They also read their CONTIV_… variables.",
        epilog="For other flags run the programs separately, as the systemd units do.",
    )
    for flag in (*_COMMON_FLAGS, *_MASTER_FLAGS, *_AGENT_FLAGS):
        parser.add_argument(flag, metavar="VALUE", help=f"passed to {_owner(flag)}")
    flags = {f"--{name.replace('_', '-')}": value for name, value in vars(parser.parse_args(argv)).items() if value}
    programs = {
        # They start together: netplugin retries until netmaster serves the store.
        "netmaster": ("weft.master.main", *_master_arguments(flags)),
        "netdns": ("weft.dns.main", *_dns_arguments(flags)),
        "netplugin": ("weft.agent.main", *_agent_arguments(flags)),
    }
    return asyncio.run(_run(programs))


def _owner(flag: str) -> str:
    if flag in _COMMON_FLAGS:
        return "every program that has it"
    return "netmaster" if flag in _MASTER_FLAGS else "netplugin"


def _master_arguments(flags: dict[str, str]) -> list[str]:
    return [f"{flag}={flags[flag]}" for flag in (*_COMMON_FLAGS, *_MASTER_FLAGS) if flag in flags]


def _agent_arguments(flags: dict[str, str]) -> list[str]:
    arguments = [f"{flag}={flags[flag]}" for flag in (*_COMMON_FLAGS, *_AGENT_FLAGS) if flag in flags]
    # netmaster puts its store socket into the data directory.
    if "--data-dir" in flags:
        arguments.append(f"--netmaster=unix:{Path(flags['--data-dir']) / 'store.sock'}")
    return arguments


def _dns_arguments(flags: dict[str, str]) -> list[str]:
    return [f"{flag}={flags[flag]}" for flag in _DNS_FLAGS if flag in flags]


async def _run(programs: Mapping[str, Sequence[str]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    children = {name: await _start(*command) for name, command in programs.items()}
    ends = {asyncio.create_task(child.wait(), name=name) for name, child in children.items()}
    stopping = asyncio.create_task(stop.wait(), name="stop")
    done, _ = await asyncio.wait({*ends, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    ended = [task for task in done if task is not stopping]
    for task in ended:
        print(f"weft up: {task.get_name()} has ended with {task.result()}", file=sys.stderr)
    await asyncio.gather(*map(_end, children.values()))
    if ended and not stop.is_set():
        return _exit_code(children[ended[0].get_name()])
    return max(map(_exit_code_after_stop, children.values()))


async def _start(module: str, *arguments: str) -> Process:
    # So that kill -9 of `weft up` ends the programs too.
    wrapper = ("-m", "weft.ctl.parent_death", str(os.getpid()), module)
    return await asyncio.create_subprocess_exec(sys.executable, *wrapper, *arguments)


async def _end(child: Process) -> None:
    """Terminate a program; kill it after the grace period."""
    if child.returncode is None:
        child.terminate()
    try:
        async with asyncio.timeout(_GRACE_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()


def _exit_code(child: Process) -> int:
    """The exit code for a program that ended unexpectedly: never 0, and 128 + n after signal n, as in shells."""
    code = child.returncode
    assert code is not None
    return 128 - code if code < 0 else code or 1


def _exit_code_after_stop(child: Process) -> int:
    # A program may die of the signal before it has installed its handler.
    return 0 if child.returncode in {0, -signal.SIGTERM, -signal.SIGINT} else _exit_code(child)
