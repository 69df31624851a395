"""A client of the REST API of this node's agent, on loopback."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import Any, cast
from urllib.parse import urlencode

from weft.ctl.client import decode_row
from weft.ctl.failures import CommandError, Unreachable, Usage
from weft.ctl.http import InvalidReply, Reply, exchange

DEFAULT_ADDRESS = "127.0.0.1:9090"
# Longer than the agent's keepalive on a stream, which it sends as an empty line.
_TIMEOUT_S = 10.0


def add_agent_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--agent` to a command."""
    # netplugin reads the same variable, so a changed address works in its environment without a flag.
    default = os.environ.get("CONTIV_NETPLUGIN_REST_ADDRESS", DEFAULT_ADDRESS)
    parser.add_argument("--agent", default=default, metavar="HOST:PORT", help=f"netplugin's REST address ({default})")


def inspect_agent(address: str) -> dict[str, Any]:
    """The state of the node (`GET /inspect/driver`)."""
    return cast("dict[str, Any]", decode_row(get_agent(address, "/inspect/driver")))


def get_agent(address: str, path: str, **query: str) -> Reply:
    """Send a GET and return its reply; `CommandError` unless the status is 200. Empty parameters are omitted."""
    host, port = _split(address)
    try:
        reply = exchange("GET", _target(path, query), host=host, port=port, headers={}, timeout=_TIMEOUT_S)
    except (OSError, InvalidReply) as error:
        raise _unreachable(address, error) from error
    if reply.status != 200:
        raise _command_error(address, reply)
    return reply


def follow_agent(address: str, path: str, **query: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines stream until the agent ends it; `Unreachable` if it stalls."""
    host, port = _split(address)
    connection = HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        with closing(connection):
            connection.request("GET", _target(path, query))
            response = connection.getresponse()
            if response.status != 200:
                raise _command_error(address, Reply(response.status, response.reason, {}, response.read()))
            while line := response.readline():
                # Empty lines keep the connection alive.
                if line.strip():
                    yield json.loads(line)
    # ValueError: a line that was cut when the agent died.
    except (OSError, HTTPException, ValueError) as error:
        raise _unreachable(address, error) from error


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise Usage(f"--agent {address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _target(path: str, query: Mapping[str, str]) -> str:
    parameters = urlencode({name: value for name, value in query.items() if value})
    return f"{path}?{parameters}" if parameters else path


def _unreachable(address: str, error: Exception) -> Unreachable:
    return Unreachable(f"cannot reach the agent at {address}: {error}; is netplugin running here?")


def _command_error(address: str, reply: Reply) -> CommandError:
    try:
        reason = str(json.loads(reply.body)["message"])
    except (ValueError, TypeError, KeyError):
        reason = f"{reply.status} {reply.reason}"
    return CommandError(f"the agent at {address} replied: {reason}")
