"""The protocol between shim and agent: one frame each way on a unix socket (docs/design/cni-wire.md).

    frame   = "WFT1", length of the body (4 bytes), body
    call    = deadline in milliseconds (4 bytes), length of the environment (4 bytes), environment, stdin to the end
    answer  = exit code (1 byte), stdout to the end

The environment is each variable as `NAME=value` with a NUL behind it. Numbers are big-endian.

The shims cannot import this module (one is a script of built-in modules, the other is C); tests compare them with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAGIC = b"WFT1"
HEADER_SIZE = 8
_CALL_HEAD = 8
MAX_STDIN = 16 * 1024 * 1024
# Stdin and environment; the kernel limits the environment to 6 MiB.
MAX_BODY = 24 * 1024 * 1024

# The default of the shim's `WEFT_CNI_SOCKET`.
SOCKET_PATH = "/run/weft/cni.sock"


class Unreadable(ValueError):
    """Not a frame of this protocol: the connection is unusable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request as the runtime made it. `deadline` is the time left, in seconds from its arrival."""

    environment: Mapping[str, str]
    stdin: bytes
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the shim prints, and the code it exits with."""

    exit_code: int
    stdout: bytes = b""


def body_size(header: bytes) -> int:
    """How many bytes follow the `HEADER_SIZE` bytes of a header."""
    if len(header) != HEADER_SIZE or not header.startswith(MAGIC):
        raise Unreadable(f"not a frame: it begins with {header[:HEADER_SIZE]!r}")
    size = int.from_bytes(header[len(MAGIC) :], "big")
    if size > MAX_BODY:
        raise Unreadable(f"a body of {size} bytes is more than {MAX_BODY}")
    return size


def encode_call(call: Call) -> bytes:
    """The frame that a shim sends."""
    # Surrogate escapes: environments are bytes, and a path in them need not be UTF-8.
    environment = b"".join(
        f"{name}={value}\0".encode(errors="surrogateescape") for name, value in call.environment.items()
    )
    return _frame(_number(round(call.deadline * 1000)) + _number(len(environment)) + environment + call.stdin)


def decode_call(body: bytes) -> Call:
    """The call in the body of a frame."""
    end = _CALL_HEAD + int.from_bytes(body[4:_CALL_HEAD], "big")
    if len(body) < end:
        raise Unreadable(f"a call of {len(body)} bytes is cut short")
    *variables, rest = body[_CALL_HEAD:end].decode(errors="surrogateescape").split("\0")
    pairs = [variable.partition("=") for variable in variables]
    if rest or not all(name and equals for name, equals, _ in pairs):
        raise Unreadable("the environment is not made of variables")
    return Call(
        environment={name: value for name, _, value in pairs},
        stdin=body[end:],
        deadline=int.from_bytes(body[:4], "big") / 1000,
    )


def encode_answer(answer: Answer) -> bytes:
    """The frame that the agent sends."""
    return _frame(answer.exit_code.to_bytes(1, "big") + answer.stdout)


def decode_answer(body: bytes) -> Answer:
    """The answer in the body of a frame."""
    if not body:
        raise Unreadable("an answer without exit code")
    return Answer(exit_code=body[0], stdout=body[1:])


def _frame(body: bytes) -> bytes:
    return MAGIC + _number(len(body)) + body


def _number(value: int) -> bytes:
    return value.to_bytes(4, "big")
