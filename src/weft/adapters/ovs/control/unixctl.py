"""Questions to ovs-vswitchd that its own tool asks (ovs-appctl(8)): JSON-RPC on a socket in its directory.

Only what people ask for goes this way, whose answers are text, and what there is no other way to ask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from weft.adapters.ovs.control.stream import DEADLINE, Stream
from weft.adapters.ovs.ovsdb.jsonrpc import Incoming, encode
from weft.domain.errors import DatapathFault

# Those that have ended may have left theirs behind; the newest is that of the one which runs.
_SOCKETS = "*vswitchd*.ctl"


class Refusal(DatapathFault):
    """The switch understood, and says no."""


@contextmanager
def asking(directory: Path, method: str, *parameters: str) -> Iterator[Callable[[], str]]:
    """Send a question, and yield what waits for its answer; `DatapathFault` when ovs-vswitchd does not run.

    What waits raises `Refusal` when that refuses.
    """
    sockets = sorted(directory.glob(_SOCKETS), key=_made_at)
    if not sockets:
        raise DatapathFault(f"{directory}: ovs-vswitchd has no control socket here")
    with closing(Stream(f"unix:{sockets[-1]}")) as stream:
        stream.send(encode({"id": 0, "method": method, "params": parameters}))
        yield partial(_answer, stream, method)


def ask_switch(directory: Path, method: str, *parameters: str) -> str:
    """What ovs-vswitchd says; see `asking`."""
    with asking(directory, method, *parameters) as answer:
        return answer()


def _answer(stream: Stream, method: str) -> str:
    incoming, until = Incoming(), time.monotonic() + DEADLINE
    while not (messages := incoming.feed(stream.receive(until=until))):
        pass
    (answer,) = messages
    if answer.error is not None:
        raise Refusal(f"ovs: {method}: {answer.error}")
    return str(answer.result)


def _made_at(path: Path) -> float:
    """When a socket was made; one that is gone since it was listed, with a switch that ends, is older than all."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
