"""`weft up`: netmaster, netplugin and netdns together on one machine, for as long as all of them live."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path

# How long a program may take to end when it is told to.
_GRACE_S = 10.0

_MASTER_FLAGS = ("--external-address", "--default-subnet")
_AGENT_FLAGS = ("--host", "--vtep-ip", "--ctrl-ip", "--cni-socket", "--contiv-socket", "--rest-address", "--run-dir")
_COMMON_FLAGS = ("--data-dir", "--log-level", "--mode")
_NAMES_FLAGS = ("--run-dir", "--log-level")


def main(argv: Sequence[str]) -> int:
    """0 when told to end; else the code of the program that ended by itself, whereupon the others are ended too."""
    parser = argparse.ArgumentParser(
        prog="weft up",
        description="Run netmaster, netplugin and netdns on this machine. Their variables CONTIV_… are heeded too.",
        epilog="For flags that are not here, run the programs by themselves, as the systemd units do.",
    )
    for flag in (*_COMMON_FLAGS, *_MASTER_FLAGS, *_AGENT_FLAGS):
        parser.add_argument(flag, metavar="VALUE", help=f"as that of {_owner(flag)}")
    given = {f"--{name.replace('_', '-')}": value for name, value in vars(parser.parse_args(argv)).items() if value}
    programs = {
        "netmaster": ("weft.master.main", *_master_arguments(given)),
        "netdns": ("weft.dns.main", *_names_arguments(given)),
        "netplugin": ("weft.agent.main", *_agent_arguments(given)),
    }
    return asyncio.run(_run(programs))


def _owner(flag: str) -> str:
    if flag in _COMMON_FLAGS:
        return "the programs that have it"
    return "netmaster" if flag in _MASTER_FLAGS else "netplugin"


def _master_arguments(given: dict[str, str]) -> list[str]:
    return [f"{flag}={given[flag]}" for flag in (*_COMMON_FLAGS, *_MASTER_FLAGS) if flag in given]


def _agent_arguments(given: dict[str, str]) -> list[str]:
    arguments = [f"{flag}={given[flag]}" for flag in (*_COMMON_FLAGS, *_AGENT_FLAGS) if flag in given]
    if "--data-dir" in given:
        arguments.append(f"--netmaster=unix:{Path(given['--data-dir']) / 'store.sock'}")
    return arguments


def _names_arguments(given: dict[str, str]) -> list[str]:
    return [f"{flag}={given[flag]}" for flag in _NAMES_FLAGS if flag in given]


async def _run(programs: Mapping[str, Sequence[str]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    children = {name: await _start(*command) for name, command in programs.items()}
    ends = {asyncio.create_task(child.wait(), name=name) for name, child in children.items()}
    told = asyncio.create_task(stop.wait(), name="told")
    done, _ = await asyncio.wait({*ends, told}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    by_itself = [task for task in done if task is not told]
    for task in by_itself:
        print(f"weft up: {task.get_name()} has ended with {task.result()}", file=sys.stderr)
    await asyncio.gather(*map(_end, children.values()))
    if by_itself and not stop.is_set():
        return _exit_code(children[by_itself[0].get_name()])
    return max(map(_exit_code_when_told, children.values()))


async def _start(module: str, *arguments: str) -> Process:
    bound = ("-m", "weft.ctl.parent_death", str(os.getpid()), module)
    return await asyncio.create_subprocess_exec(sys.executable, *bound, *arguments)


async def _end(child: Process) -> None:
    """Tell a program to end, and end it when it does not."""
    if child.returncode is None:
        child.terminate()
    try:
        async with asyncio.timeout(_GRACE_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()


def _exit_code(child: Process) -> int:
    """Of a program that nobody told to end: never 0, and 128 + n when signal n ended it, as shells have it."""
    code = child.returncode
    assert code is not None
    return 128 - code if code < 0 else code or 1


def _exit_code_when_told(child: Process) -> int:
    return 0 if child.returncode in {0, -signal.SIGTERM, -signal.SIGINT} else _exit_code(child)
