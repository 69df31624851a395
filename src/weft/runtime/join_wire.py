"""The written contract of joining: a request for a certificate in PEM, with an agent's token as bearer; one answer."""

from __future__ import annotations

import msgspec

PATH = "/join"
LARGEST = 16 << 10


class Joined(msgspec.Struct, frozen=True):
    """The certificate in PEM. Its common name is the node that the token is of."""

    certificate: str
