"""Asks the agent of this machine, on loopback."""

from __future__ import annotations

import argparse
import os
from typing import Any, cast

from weft.ctl.client import decode_row
from weft.ctl.failures import Refused, Unreachable, Usage
from weft.ctl.http import NotHttp, decode_reply, encode_request, exchange

DEFAULT_ADDRESS = "127.0.0.1:9090"
_WITHIN_S = 10.0


def add_agent_flag(parser: argparse.ArgumentParser) -> None:
    """The flag `--agent`, which every command has that asks the agent."""
    default = os.environ.get("CONTIV_NETPLUGIN_REST_ADDRESS", DEFAULT_ADDRESS)
    parser.add_argument("--agent", default=default, metavar="HOST:PORT", help=f"where netplugin's REST is ({default})")


def inspect_agent(address: str) -> dict[str, Any]:
    """What the agent says of its node (`GET /inspect/driver`)."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise Usage(f"--agent {address!r} is not HOST:PORT")
    request = encode_request("GET", "/inspect/driver", headers={"Host": address}, body=b"")
    try:
        reply = decode_reply(exchange(host.strip("[]"), int(port), request=request, timeout=_WITHIN_S, tls=None))
    except (OSError, NotHttp) as error:
        raise Unreachable(f"cannot reach the agent at {address}: {error}; is netplugin running here?") from error
    if reply.status != 200:
        raise Refused(f"the agent at {address} answered {reply.status} {reply.reason}")
    return cast("dict[str, Any]", decode_row(reply))
