"""The written contract of joining: a request for a certificate in PEM, with an agent's token as bearer; one answer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

PATH = "/join"
LARGEST = 16 << 10
# Begins the URI in a certificate that says whom it is for: a common name has 64 characters at most, a node's 256.
NAME_URI = "weft:name:"


class Joined(msgspec.Struct, frozen=True):
    """The certificate in PEM. It names the node that the token is of."""

    certificate: str


def named_by(uris: Iterable[str], common_names: Iterable[str]) -> str:
    """Whom a certificate is for; empty when it names nobody, or several. Where no URI says it, the common name does."""
    names = [uri.removeprefix(NAME_URI) for uri in uris if uri.startswith(NAME_URI)] or list(common_names)
    return names[0] if len(names) == 1 else ""
