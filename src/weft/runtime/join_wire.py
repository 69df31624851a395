"""The enrollment protocol: a CSR in PEM with the agent's token as bearer, and the signed certificate in response."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

PATH = "/join"
# Bytes of a request; a CSR has about 1 KiB.
LARGEST = 16 << 10
# Prefix of the SAN URI with the node's name: a common name has at most 64 characters, a node name 256.
NAME_URI = "weft:name:"


class Joined(msgspec.Struct, frozen=True):
    """The certificate in PEM, for the node that the token is bound to."""

    certificate: str


def named_by(uris: Iterable[str], common_names: Iterable[str]) -> str:
    """The name in a certificate: its SAN URI, else its common name; empty if there is none or more than one."""
    # Exactly one name: a certificate with two could act for both nodes.
    names = [uri.removeprefix(NAME_URI) for uri in uris if uri.startswith(NAME_URI)] or list(common_names)
    return names[0] if len(names) == 1 else ""
