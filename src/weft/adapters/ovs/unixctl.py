"""Questions to ovs-vswitchd that its own tool asks (ovs-appctl(8)): JSON-RPC on a socket in its directory.

Only what people ask for goes this way: the answers are text.
"""

from __future__ import annotations

import time
from pathlib import Path

from weft.adapters.ovs.jsonrpc import Incoming, encode
from weft.adapters.ovs.streams import DEADLINE, Stream
from weft.domain.errors import DatapathFault

_SOCKETS = "*vswitchd*.ctl"
"""Those that have ended may have left theirs behind; the newest is that of the one which runs."""


def ask_switch(directory: Path, method: str, *parameters: str) -> str:
    """What ovs-vswitchd says; `DatapathFault` when it does not run, or refuses."""
    sockets = sorted(directory.glob(_SOCKETS), key=lambda path: path.stat().st_mtime)
    if not sockets:
        raise DatapathFault(f"{directory}: ovs-vswitchd has no control socket here")
    stream = Stream(f"unix:{sockets[-1]}")
    try:
        stream.send(encode({"id": 0, "method": method, "params": parameters}))
        incoming, until = Incoming(), time.monotonic() + DEADLINE
        while not (messages := incoming.feed(stream.receive(until=until))):
            pass
    finally:
        stream.close()
    (answer,) = messages
    if answer.error is not None:
        raise DatapathFault(f"ovs: {method}: {answer.error}")
    return str(answer.result)
