"""The enrollment protocol: a CSR in PEM with the agent's token as bearer, and the signed certificate in response."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

PATH = "/join"
# Bytes of a request; a CSR has about 1 KiB.
LARGEST = 16 << 10
# Prefix of the SAN URI with the node's name: a common name has at most 64 characters, a node name 256.
NAME_URI = "weft:name:"

# The organizational unit (OU) of a node's certificate that was made by other tools, with the name as common name.
NODE_UNIT = "weft:nodes"


class Joined(msgspec.Struct, frozen=True):
    """The certificate in PEM, for the node that the token is bound to."""

    certificate: str


def named_by(uris: Iterable[str], common_names: Iterable[str], *, units: Iterable[str]) -> str:
    """The node's name in a certificate; empty if there is none or more than one.

    It is a SAN URI of ours or, with our organizational unit, the common name. Any other certificate is not that of a
    node: an organization's CA signs those of its users and web servers too.
    """
    names = [uri.removeprefix(NAME_URI) for uri in uris if uri.startswith(NAME_URI)]
    if not names and NODE_UNIT in units:
        names = list(common_names)
    # Exactly one name: a certificate with two could act for both nodes.
    return names[0] if len(names) == 1 else ""
