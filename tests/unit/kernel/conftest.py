"""pyroute2 decodes what we encode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import pytest
from pyroute2.netlink.rtnl.fibmsg import fibmsg
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from weft.kernel.netlink.codec import Request

_FORMS = {16: ifinfmsg, 20: ifaddrmsg, 24: rtmsg, 28: ndmsg, 32: fibmsg}


class DecodedMessage(NamedTuple):
    """A message as pyroute2 understands it: the fixed part, and the attributes by name, nested ones likewise."""

    fields: Mapping[str, Any]
    attributes: Mapping[str, Any]


class Decoder(Protocol):
    """Takes a request apart."""

    def __call__(self, request: Request) -> DecodedMessage: ...


def _attributes(message: Any) -> dict[str, Any]:
    return {
        attribute[0]: _attributes(attribute[1]) if hasattr(attribute[1], "get_attr") else attribute[1]
        for attribute in message["attrs"]
    }


@pytest.fixture
def decode() -> Decoder:
    def decode(request: Request) -> DecodedMessage:
        message = _FORMS[request.kind & ~3](request.encode(sequence=1))
        message.decode()
        return DecodedMessage(message, _attributes(message))

    return decode
