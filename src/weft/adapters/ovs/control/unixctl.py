"""Requests to ovs-vswitchd over its control socket, as ovs-appctl(8) sends them: JSON-RPC in its run directory.

Only for what no protocol offers: traces and versions for people, and waiting for revalidators.
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

# Crashed processes leave their sockets behind. The newest one is that of the running process.
_SOCKETS = "*vswitchd*.ctl"
_REVALIDATOR_WAIT = "revalidator/wait"


class UnixctlError(DatapathFault):
    """ovs-vswitchd has rejected the command."""


@contextmanager
def unixctl_request(directory: Path, method: str, *parameters: str) -> Iterator[Callable[[], str]]:
    """Send a command, and yield a function that waits for its result.

    `DatapathFault` if ovs-vswitchd does not run; the function raises `UnixctlError` if it rejects the command.
    """
    sockets = sorted(directory.glob(_SOCKETS), key=_created_at)
    if not sockets:
        raise DatapathFault(f"{directory}: no control socket of ovs-vswitchd")
    # One connection for each command: these are rare, and ovs-vswitchd may restart in between.
    with closing(Stream(f"unix:{sockets[-1]}")) as stream:
        stream.send(encode({"id": 0, "method": method, "params": parameters}))
        yield partial(_reply, stream, method)


def unixctl_call(directory: Path, method: str, *parameters: str) -> str:
    """The result of a command; see `unixctl_request`."""
    with unixctl_request(directory, method, *parameters) as reply:
        return reply()


def _reply(stream: Stream, method: str) -> str:
    incoming, until = Incoming(), time.monotonic() + DEADLINE
    while not (messages := incoming.feed(stream.receive(until=until))):
        pass
    reply = messages[0]  # we have asked once; anything more is noise
    if reply.error is not None:
        raise UnixctlError(f"ovs: {method}: {reply.error}")
    return str(reply.result)


def _created_at(path: Path) -> float:
    """The time of a socket; 0 for one that was deleted since it was listed, by a process that exits."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def wait_for_revalidation(directory: Path, *, trigger: Callable[[], None]) -> None:
    """Return when all earlier flow changes apply to every packet. `trigger` makes the revalidators start a round.

    OVS replies to a flow change before its revalidators have updated the datapath cache (megaflows), by which it goes
    on forwarding. They report the end of a round, but the current round may have started before the change: so wait for
    its end and for that of the next. Without `trigger` a round starts only every half second.
    """
    unixctl_call(directory, "version")  # a round trip of the main thread, after which the revalidators know the change
    try:
        for _ in range(2):
            # Register before triggering: a round may take no time.
            with unixctl_request(directory, _REVALIDATOR_WAIT) as wait_for_end:
                trigger()
                wait_for_end()
    except UnixctlError:
        # A switch with datapaths of both types does not support the command. There is no other way to know.
        return
