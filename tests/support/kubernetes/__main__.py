"""`python -m tests.support.kubernetes PROGRAMS`: a kube-apiserver to try things against, until it is interrupted.

PROGRAMS is the directory that `scripts/build-kubernetes` prints. The server listens on loopback, and the path of a
kubeconfig that may do everything is printed when it is ready.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from tests.support.kubernetes.api_server import ADMIN, running_api_server


async def serve(programs: Path) -> None:
    """Run the server until SIGINT or SIGTERM; nothing of it is left then."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    with tempfile.TemporaryDirectory(prefix="weft-kubernetes-") as directory:
        async with running_api_server(Path(directory), programs=programs) as server:
            sys.stdout.write(f"export KUBECONFIG={server.kubeconfig(*ADMIN)}\n")
            sys.stdout.flush()
            await ended.wait()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.support.kubernetes PROGRAMS")
    asyncio.run(serve(Path(sys.argv[1])))
