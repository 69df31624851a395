"""Which node sent a request: told by its client certificate, or on the unix socket by a header.

The header is believed there because only root and our own user are let in.
"""

from __future__ import annotations

import socket

from aiohttp import web

from weft.domain.errors import Denied, Invalid
from weft.domain.ids import MAX_LONG_NAME, NodeName, check_name
from weft.runtime.join_wire import named_by
from weft.runtime.store.wire import NODE_HEADER
from weft.runtime.unix import check_caller


def node_of(request: web.Request) -> NodeName:
    """The name of the node, or `Denied`."""
    transport = request.transport
    if transport is None:
        raise Denied("the connection is closed")
    if transport.get_extra_info("sslcontext") is not None:
        name = _name_in(transport.get_extra_info("peercert"))
    else:
        check_peer(transport.get_extra_info("socket"))
        name = request.headers.get(NODE_HEADER, "")
    try:
        return NodeName(check_name(name, field="node", limit=MAX_LONG_NAME))
    except Invalid as error:
        raise Denied(f"the caller names no node: {error.message}") from error


def _name_in(certificate: object) -> str:
    """Whom a certificate is for, as `ssl.SSLSocket.getpeercert` gives it; empty when it names nobody."""
    if not isinstance(certificate, dict):
        return ""
    return named_by(
        (value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"),
        (value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"),
    )


def check_peer(peer: socket.socket | None) -> None:
    """`Denied` unless root or our own user is at the other end of a unix socket."""
    if peer is None or peer.family != socket.AF_UNIX:
        raise Denied("nodes must come over TLS with a certificate, or over the unix socket")
    check_caller(peer)
