"""Which node sent a request: told by its client certificate, or on the unix socket by a header.

The header is believed there because only root and our own user are let in.
"""

from __future__ import annotations

import socket

from aiohttp import web

from weft.domain.errors import Denied, Invalid
from weft.domain.ids import MAX_LONG_NAME, NodeName, check_name
from weft.runtime.store_wire import NODE_HEADER
from weft.runtime.unix import check_caller


def node_of(request: web.Request) -> NodeName:
    """The name of the node, or `Denied`."""
    transport = request.transport
    if transport is None:
        raise Denied("the connection is closed")
    if transport.get_extra_info("sslcontext") is not None:
        name = _common_name(transport.get_extra_info("peercert"))
    else:
        check_peer(transport.get_extra_info("socket"))
        name = request.headers.get(NODE_HEADER, "")
    try:
        return NodeName(check_name(name, field="node", limit=MAX_LONG_NAME))
    except Invalid as error:
        raise Denied(f"the caller names no node: {error.message}") from error


def _common_name(certificate: object) -> str:
    """The common name in a certificate as `ssl.SSLSocket.getpeercert` gives it; empty when there is none."""
    subject = certificate.get("subject", ()) if isinstance(certificate, dict) else ()
    return next((value for part in subject for name, value in part if name == "commonName"), "")


def check_peer(peer: socket.socket | None) -> None:
    """`Denied` unless root or our own user is at the other end of a unix socket."""
    if peer is None or peer.family != socket.AF_UNIX:
        raise Denied("nodes must come over TLS with a certificate, or over the unix socket")
    check_caller(peer)
