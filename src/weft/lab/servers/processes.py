"""Child processes that the kernel kills with their parent."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from weft.lab.waiting import DEADLINE

__all__ = ["DEADLINE", "Child", "free_port"]

# Linux uses 32768 to 60999 by default (ip_local_port_range).
_OUTSIDE_EPHEMERAL = range(20_000, 32_000)


def free_port() -> int:
    """A free TCP port of 127.0.0.1.

    It is outside the kernel's ephemeral range, so that no outgoing connection takes it while a server restarts.
    """
    # Another process may still take the port before the server does; with 12,000 of them that is rare.
    while True:
        port = random.choice(_OUTSIDE_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Child:
    """A child process with a pipe for its standard output. Killed at the end of the block, or when the parent dies."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        with ExitStack() as files:
            # pdeathsig: no cleanup code runs when a test run is killed.
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if log is None else files.enter_context(log.open("ab")),
                env={**os.environ, **(env or {})},
            )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._unread = b""

    @classmethod
    def python(cls, module: str, *arguments: str, log: Path | None = None) -> Self:
        """Run a Python module as a program."""
        return cls([sys.executable, "-m", module, *arguments], log=log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Its exit code: None while it runs, -n after signal n."""
        return self._process.poll()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop its execution (SIGSTOP) inside the block, as an overloaded machine would."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def read_line(self, *, within: float = DEADLINE) -> str:
        """The next line of its output; `TimeoutError` or `EOFError` if there is none."""
        while b"\n" not in self._unread:
            # Not readline() on the pipe: it has no timeout.
            ready, _, _ = select.select([self._output], [], [], within)
            if not ready:
                raise TimeoutError(f"process {self.pid} printed nothing for {within} s")
            data = os.read(self._output.fileno(), 65_536)
            if not data:
                raise EOFError(f"process {self.pid} has ended with code {self._process.wait(DEADLINE)}")
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode()

    async def next_line(self) -> str:
        """As `read_line`, without blocking the event loop."""
        return await asyncio.to_thread(self.read_line)

    def read_rest(self) -> list[str]:
        """The unread complete lines of a process that has ended."""
        *lines, _ = (self._unread + self._output.read()).split(b"\n")
        self._unread = b""
        return [line.decode() for line in lines]

    def kill(self) -> None:
        """Kill it with SIGKILL; idempotent."""
        # Wait, so that no zombie stays and the port is free.
        self._process.kill()
        self._process.wait(DEADLINE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._output.close()
