"""`weft capture POD`: captures the packets of a workload on its host-side interface, as a pcap file.

The format is classic pcap with nanosecond timestamps (draft-ietf-opsawg-pcap).
"""

from __future__ import annotations

import argparse
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from weft.ctl.failures import Failure, FileFault, Usage
from weft.ctl.weft.agent_client import add_agent_flag, inspect_agent
from weft.domain.errors import Conflict, NotFound
from weft.domain.ids import TenantName
from weft.drivers import datapath_tools

_ETH_P_ALL = 0x0003
_PCAP_MAGIC_NS = 0xA1B23C4D
_LINKTYPE_ETHERNET = 1
# The maximum of tcpdump and libpcap (MAXIMUM_SNAPLEN).
_SNAPLEN = 262_144
_KEYS = ("endpointID", "containerID", "containerName")


def main(argv: Sequence[str]) -> int:
    """Capture until a number of packets or seconds, or Ctrl-C. Every packet is written at once."""
    parser = argparse.ArgumentParser(
        prog="weft capture", description="Capture the packets of a workload to a pcap file."
    )
    parser.add_argument("pod", metavar="POD", help="endpoint id, container id or its prefix, pod, or namespace/pod")
    parser.add_argument("--write", "-w", default="-", metavar="FILE", help="output file; - is the standard output (-)")
    parser.add_argument("--count", "-c", type=_positive, default=10_000, help="maximum number of packets (10000)")
    parser.add_argument("--seconds", "-s", type=_positive, default=60, help="maximum number of seconds (60)")
    add_agent_flag(parser)
    args = parser.parse_args(argv)
    try:
        if args.write == "-" and sys.stdout.isatty():
            raise Usage("refusing to write binary data to a terminal: use --write FILE or a pipe")
        node = inspect_agent(args.agent)
        port = find_port(node["ports"], args.pod)
        # The host-side interface is in the tenant netns (linux) or in the host's (ovs).
        datapath_tools(node["datapath"]).enter_host_side_netns(
            Path(node["runDir"]) / "netns", TenantName(port["tenant"])
        )
        records = _capture(port["device"], count=args.count, seconds=args.seconds)
        captured = _write(records, args.write)
    except Failure as failure:
        print(f"weft capture: {failure.message}", file=sys.stderr)
        return failure.exit_code
    print(f"weft capture: {captured} packets of {port['endpointID']} on {port['device']}", file=sys.stderr)
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def find_port(ports: Sequence[Mapping[str, Any]], text: str) -> Mapping[str, Any]:
    """The workload of this node that a text identifies; `NotFound` for none, `Conflict` for several."""
    plugged = [port for port in ports if port["device"]]
    # A pod may be given without its namespace. An exact match wins over a container id with that prefix.
    exact = [
        port for port in plugged if text in {port[key] for key in _KEYS} | {port["containerName"].partition("/")[2]}
    ]
    found = exact or [port for port in plugged if text and port["containerID"].startswith(text)]
    if not found:
        raise NotFound(f"{text!r} is not on this node; it has {_names(plugged) or 'no workload'}")
    if len(found) > 1:
        raise Conflict(f"{text!r} is ambiguous: {_names(found)}")
    return found[0]


def _names(ports: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(sorted(str(port["endpointID"]) for port in ports))


def _write(records: Iterator[bytes], path: str) -> int:
    """Write the file; the number of packets."""
    try:
        if path == "-":
            return _copy(records, sys.stdout.buffer)
        with Path(path).open("wb") as file:
            return _copy(records, file)
    except OSError as error:
        raise FileFault(f"{path}: {error.strerror}") from error


def _copy(records: Iterator[bytes], file: BinaryIO) -> int:
    file.write(pcap_header())
    file.flush()
    written = 0
    with suppress(KeyboardInterrupt):
        for record in records:
            file.write(record)
            # Flushed each time, for a reader at the other end of a pipe.
            file.flush()
            written += 1
    return written


def _capture(device: str, *, count: int, seconds: float) -> Iterator[bytes]:
    """The packets of a device of the calling thread's namespace, in both directions, as pcap records."""
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL)) as tap:
        tap.bind((device, 0))
        for _ in range(count):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            # One deadline for the capture, not one per packet.
            tap.settimeout(remaining)
            try:
                data = tap.recv(_SNAPLEN)
            except TimeoutError:
                return
            yield pcap_record(data, at_ns=time.time_ns())


def pcap_header() -> bytes:
    """The header of a pcap file."""
    return struct.pack("=IHHiIII", _PCAP_MAGIC_NS, 2, 4, 0, 0, _SNAPLEN, _LINKTYPE_ETHERNET)


def pcap_record(data: bytes, *, at_ns: int) -> bytes:
    """A packet with its record header. Packets are never truncated, so both lengths are equal."""
    seconds, nanoseconds = divmod(at_ns, 1_000_000_000)
    return struct.pack("=IIII", seconds, nanoseconds, len(data), len(data)) + data
