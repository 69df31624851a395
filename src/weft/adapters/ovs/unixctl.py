"""Questions to ovs-vswitchd that its own tool asks (ovs-appctl(8)): JSON-RPC on a socket in its directory.

Only what people ask for goes this way, whose answers are text, and what there is no other way to ask.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Self

from weft.adapters.ovs.jsonrpc import Incoming, encode
from weft.adapters.ovs.streams import DEADLINE, Stream
from weft.domain.errors import DatapathFault

_SOCKETS = "*vswitchd*.ctl"
"""Those that have ended may have left theirs behind; the newest is that of the one which runs."""


class Refusal(DatapathFault):
    """The switch understood, and says no."""


class Asked:
    """A question that has been sent; `DatapathFault` when ovs-vswitchd does not run."""

    def __init__(self, directory: Path, method: str, *parameters: str) -> None:
        sockets = sorted(directory.glob(_SOCKETS), key=_made_at)
        if not sockets:
            raise DatapathFault(f"{directory}: ovs-vswitchd has no control socket here")
        self._method = method
        self._stream = Stream(f"unix:{sockets[-1]}")
        self._stream.send(encode({"id": 0, "method": method, "params": parameters}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def answer(self) -> str:
        """What ovs-vswitchd says; it is waited for."""
        incoming, until = Incoming(), time.monotonic() + DEADLINE
        while not (messages := incoming.feed(self._stream.receive(until=until))):
            pass
        (answer,) = messages
        if answer.error is not None:
            raise Refusal(f"ovs: {self._method}: {answer.error}")
        return str(answer.result)


def _made_at(path: Path) -> float:
    """When a socket was made; one that is gone since it was listed, with a switch that ends, is older than all."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def ask_switch(directory: Path, method: str, *parameters: str) -> str:
    """What ovs-vswitchd says; `DatapathFault` when it does not run, `Refusal` when it refuses."""
    with Asked(directory, method, *parameters) as asked:
        return asked.answer()
