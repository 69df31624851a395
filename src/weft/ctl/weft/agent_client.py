"""Asks the agent of this machine, on loopback."""

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
from weft.ctl.http import NotHttp, Reply, decode_reply, encode_request, exchange

DEFAULT_ADDRESS = "127.0.0.1:9090"
_WITHIN_S = 10.0


def add_agent_flag(parser: argparse.ArgumentParser) -> None:
    """The flag `--agent`, which every command has that asks the agent."""
    default = os.environ.get("CONTIV_NETPLUGIN_REST_ADDRESS", DEFAULT_ADDRESS)
    parser.add_argument("--agent", default=default, metavar="HOST:PORT", help=f"where netplugin's REST is ({default})")


def inspect_agent(address: str) -> dict[str, Any]:
    """What the agent says of its node (`GET /inspect/driver`)."""
    return cast("dict[str, Any]", decode_row(ask_agent(address, "/inspect/driver")))


def ask_agent(address: str, path: str, **query: str) -> Reply:
    """The agent's answer to a GET, which must be a good one. Empty members of the query are left out."""
    host, port = _split(address)
    request = encode_request("GET", _target(path, query), headers={"Host": address}, body=b"")
    try:
        reply = decode_reply(exchange(host, port, request=request, timeout=_WITHIN_S, tls=None))
    except (OSError, NotHttp) as error:
        raise _unreachable(address, error) from error
    if reply.status != 200:
        raise _refused(address, reply)
    return reply


def follow_agent(address: str, path: str, **query: str) -> Iterator[dict[str, Any]]:
    """The objects that the agent sends line by line, until it ends the stream or has been silent for too long."""
    host, port = _split(address)
    connection = HTTPConnection(host, port, timeout=_WITHIN_S)
    try:
        with closing(connection):
            connection.request("GET", _target(path, query), headers={"Host": address})
            answer = connection.getresponse()
            if answer.status != 200:
                raise _refused(address, Reply(answer.status, answer.reason, {}, answer.read()))
            while line := answer.readline():
                if line.strip():
                    yield json.loads(line)
    except (OSError, HTTPException, ValueError) as error:
        raise _unreachable(address, error) from error


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise Usage(f"--agent {address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _target(path: str, query: Mapping[str, str]) -> str:
    given = urlencode({name: value for name, value in query.items() if value})
    return f"{path}?{given}" if given else path


def _unreachable(address: str, error: Exception) -> Unreachable:
    return Unreachable(f"cannot reach the agent at {address}: {error}; is netplugin running here?")


def _refused(address: str, reply: Reply) -> CommandError:
    try:
        reason = str(json.loads(reply.body)["message"])
    except (ValueError, TypeError, KeyError):
        reason = f"{reply.status} {reply.reason}"
    return CommandError(f"the agent at {address} answered: {reason}")
