"""`weft capture POD`: the packets of a workload, taken at its host end, as a capture file."""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from weft.ctl.failures import Failure, FileFault, Usage
from weft.ctl.weft import pcap
from weft.ctl.weft.agent_client import add_agent_flag, inspect_agent
from weft.domain.errors import Conflict, NotFound
from weft.domain.ids import TenantName
from weft.drivers import datapath_tools

_ALL_PROTOCOLS = 0x0003
_KEYS = ("endpointID", "containerID", "containerName")


def main(argv: Sequence[str]) -> int:
    """Ends after so many packets or seconds, or at Ctrl-C; what was seen until then is in the file."""
    parser = argparse.ArgumentParser(prog="weft capture", description="Write the packets of a workload to a file.")
    parser.add_argument("pod", metavar="POD", help="endpoint id, container id or its beginning, pod, or namespace/pod")
    parser.add_argument("--write", "-w", default="-", metavar="FILE", help="where to; - is the standard output (-)")
    parser.add_argument("--count", "-c", type=_positive, default=10_000, help="packets at most (10000)")
    parser.add_argument("--seconds", "-s", type=_positive, default=60, help="seconds at most (60)")
    add_agent_flag(parser)
    args = parser.parse_args(argv)
    try:
        if args.write == "-" and sys.stdout.isatty():
            raise Usage("a capture is no text: write it to a file with --write, or into a pipe")
        node = inspect_agent(args.agent)
        port = find_port(node["ports"], args.pod)
        datapath_tools(node["datapath"]).enter_host_ends(Path(node["runDir"]) / "netns", TenantName(port["tenant"]))
        packets = _packets(port["device"], count=args.count, seconds=args.seconds)
        seen = _write(packets, args.write)
    except Failure as failure:
        print(f"weft capture: {failure.message}", file=sys.stderr)
        return failure.exit_code
    print(f"weft capture: {seen} packets of {port['endpointID']} on {port['device']}", file=sys.stderr)
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def find_port(ports: Sequence[Mapping[str, Any]], text: str) -> Mapping[str, Any]:
    """The one workload of this node that is meant; `NotFound` for none, `Conflict` for several."""
    wired = [port for port in ports if port["device"]]
    exact = [port for port in wired if text in {port[key] for key in _KEYS} | {port["containerName"].partition("/")[2]}]
    found = exact or [port for port in wired if text and port["containerID"].startswith(text)]
    if not found:
        raise NotFound(f"{text!r} is not on this node; it has {_names(wired) or 'no workload'}")
    if len(found) > 1:
        raise Conflict(f"{text!r} may mean several: {_names(found)}")
    return found[0]


def _names(ports: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(sorted(str(port["endpointID"]) for port in ports))


def _write(packets: Iterator[bytes], path: str) -> int:
    """Write the packets as they come; how many there were."""
    try:
        if path == "-":
            return _copy(packets, sys.stdout.buffer)
        with Path(path).open("wb") as file:
            return _copy(packets, file)
    except OSError as error:
        raise FileFault(f"{path}: {error.strerror}") from error


def _copy(packets: Iterator[bytes], file: BinaryIO) -> int:
    file.write(pcap.file_header())
    file.flush()
    seen = 0
    with suppress(KeyboardInterrupt):
        for packet in packets:
            file.write(packet)
            file.flush()
            seen += 1
    return seen


def _packets(device: str, *, count: int, seconds: float) -> Iterator[bytes]:
    """What passes a device of the calling thread's namespace, both ways, as records of a capture file."""
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as tap:
        tap.bind((device, 0))
        for _ in range(count):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            tap.settimeout(left)
            try:
                data = tap.recv(pcap.LONGEST)
            except TimeoutError:
                return
            yield pcap.record(data, length=len(data), at_ns=time.time_ns())
