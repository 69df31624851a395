"""Child processes for tests: started with a deadline, and gone with the test, whatever happens to it."""

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

_OUTSIDE_EPHEMERAL = range(20_000, 32_000)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on.

    Outside the range from which the kernel takes ports for outgoing connections, so that a server which is killed and
    started again finds its port still free.
    """
    while True:
        port = random.choice(_OUTSIDE_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Child:
    """A running process whose standard output is ours to read. Killed at the end of the block, or when we die."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        with ExitStack() as files:
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
        """This Python, running a module as a program."""
        return cls([sys.executable, "-m", module, *arguments], log=log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """What it ended with; None while it runs, -n when signal n ended it."""
        return self._process.poll()

    @contextmanager
    def held_still(self) -> Iterator[None]:
        """While the block runs it does nothing, as on a machine under great strain."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def read_line(self, *, within: float = DEADLINE) -> str:
        """The next line it prints; `TimeoutError` or `EOFError` when none comes."""
        while b"\n" not in self._unread:
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
        """As `read_line`, while the event loop goes on."""
        return await asyncio.to_thread(self.read_line)

    def read_rest(self) -> list[str]:
        """All whole lines that a process which has ended printed and nobody read."""
        *lines, _ = (self._unread + self._output.read()).split(b"\n")
        self._unread = b""
        return [line.decode() for line in lines]

    def kill(self) -> None:
        """End it as kill -9 does; ended already is fine."""
        self._process.kill()
        self._process.wait(DEADLINE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._output.close()
