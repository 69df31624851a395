"""Changes samples into hostile inputs. Everything derives from the given `Random`, so a seed reproduces an input."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import Enum
from random import Random
from typing import Any, Literal

import msgspec

# Some parsers take megabytes; what breaks them is nearly always found with less.
MAX_INPUT = 1 << 16

_EDGES = (0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 31, 32, 63, 64, 127, 128, 191, 192, 254, 255)
_SIZES = (1, 2, 4, 8)
_ORDERS: tuple[Literal["big", "little"], ...] = ("big", "little")
_TEXTS = (
    "",
    " ",
    "\0",
    ".",
    "..",
    "/",
    "a/b",
    "%s",
    "-1",
    "0",
    "null",
    "10.0.0.1",
    "10.0.0.0/8",
    "0.0.0.0/0",
    "::",
    "fd00::1/64",
    "::ffff:10.0.0.1",
    "999.1.1.1",
    "10.0.0.1/33",
    "02:02:0a:00:00:02",
    "x" * 64,
    "y" * 254,
    "z" * 5000,
    "ä",
    "\u202e",
    "🙂",
    "a" * 63 + "." + "b" * 63,
    "default",
    "TCP",
    "tcp/80",
    "80-90",
    "1e999",
)
# Written as escapes by JSON's encoder. MessagePack cannot carry them.
_SURROGATES = ("\ud800", "eth\udcff0")
_NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    53,
    80,
    255,
    256,
    4094,
    4095,
    4096,
    65_535,
    65_536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    0.5,
    -0.0,
    1e300,
)
_NOT_IN_MSGPACK = (10**25, -(10**25), 10**400, float("nan"), float("inf"))
_RAW_JSON = (
    b"[" * 2_000,
    b'{"a":' * 2_000,
    b"[" * 30_000 + b"]" * 30_000,
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b"1" * 5_000,
    b'"\\ud800"',
    b"{}{}",
    b"nul",
    b"-",
    b"1e400",
    b'{"a":1,"a":2}',
    b'"\xed\xa0\x80"',
    b" " * 1_000 + b"{}",
)


class Form(Enum):
    """How the bytes of a parser are made up. Trees are mutated as trees most of the time, else as bytes."""

    BYTES = "bytes"
    JSON = "json"
    MSGPACK = "msgpack"


class Mutator:
    """Makes inputs from samples. `words` are the tokens of the format that mutations insert."""

    def __init__(self, samples: Sequence[bytes], *, form: Form = Form.BYTES, words: Sequence[bytes] = ()) -> None:
        self._samples = samples
        self._form = form
        self._words = words
        self._trees = [] if form is Form.BYTES else [_decode(form, sample) for sample in samples]
        self._names = sorted({name for tree in self._trees for name in _names(tree)})

    def input(self, rng: Random) -> bytes:
        """One input: a sample that was changed one to eight times."""
        at = rng.randrange(len(self._samples))
        if self._form is not Form.BYTES and rng.random() < 0.75:
            return self._tree(rng, at)
        data = bytearray(self._samples[at])
        for _ in range(min(8, 1 + int(rng.expovariate(0.7)))):
            data = rng.choice(_BYTE_CHANGES)(rng, data, self._samples, self._words)
        return bytes(data[:MAX_INPUT])

    def _tree(self, rng: Random, at: int) -> bytes:
        tree = msgspec.msgpack.decode(msgspec.msgpack.encode(self._trees[at]))  # a copy that mutations may change
        for _ in range(min(8, 1 + int(rng.expovariate(0.7)))):
            tree = self._change_tree(rng, tree)
        if self._form is Form.MSGPACK:
            return msgspec.msgpack.encode(tree)[:MAX_INPUT]
        data = json.dumps(tree, ensure_ascii=True).encode()
        if rng.random() < 0.1:  # values that no tree can hold: put in place of a number or a text
            begin = rng.randrange(len(data) + 1)
            data = data[:begin] + rng.choice(_RAW_JSON) + data[begin + rng.randrange(8) :]
        return data[:MAX_INPUT]

    def _change_tree(self, rng: Random, tree: Any) -> Any:
        """Change one node, found by a random walk from the root."""
        parent: Any = None
        where: Any = None
        node = tree
        while isinstance(node, (dict, list)) and node and (parent is None or rng.random() < 0.8):
            parent, where = node, rng.choice([*node] if isinstance(node, dict) else range(len(node)))
            node = parent[where]
        if parent is None:
            return self._leaf(rng)
        change = rng.randrange(8)
        if change <= 2:
            parent[where] = self._leaf(rng)
        elif change == 3:
            del parent[where]
        elif change == 4:
            parent[where] = rng.choice(
                [[node], {"": node}, [node, node], [node] * 100, {rng.choice(self._names or [""]): node}]
            )
        elif change == 5:
            # A part of another sample, perhaps of another type than the place takes.
            parent[where] = _some_part(rng, rng.choice(self._trees))
        elif change == 6 and isinstance(parent, dict):
            parent[str(rng.choice(self._names or [""]) if rng.random() < 0.7 else rng.choice(_TEXTS))] = node
        elif isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), self._leaf(rng))
        else:
            parent[where] = _edit_text(rng, node) if isinstance(node, str) else self._leaf(rng)
        return tree

    def _leaf(self, rng: Random) -> Any:
        kind = rng.randrange(10)
        if kind < 4:
            return rng.choice(_TEXTS if self._form is Form.MSGPACK or rng.random() < 0.8 else _SURROGATES)
        if kind < 7:
            return rng.choice(_NUMBERS if self._form is Form.MSGPACK or rng.random() < 0.9 else _NOT_IN_MSGPACK)
        if kind == 7 and self._words:
            return rng.choice(self._words).decode(errors="replace")
        if kind == 8:
            return rng.choice([[], {}, [[]], [{}], [None], {"": None}, [[[[]]]]])
        return rng.choice([None, True, False])


def _decode(form: Form, sample: bytes) -> Any:
    return msgspec.json.decode(sample) if form is Form.JSON else msgspec.msgpack.decode(sample)


def _names(tree: Any) -> set[str]:
    if isinstance(tree, dict):
        return {str(name) for name in tree}.union(*map(_names, tree.values()))
    return set().union(*map(_names, tree)) if isinstance(tree, list) else set()


def _some_part(rng: Random, tree: Any) -> Any:
    while isinstance(tree, (dict, list)) and tree and rng.random() < 0.8:
        tree = rng.choice([*tree.values()] if isinstance(tree, dict) else tree)
    # A copy: a part that is put into itself would be a tree without end.
    return msgspec.msgpack.decode(msgspec.msgpack.encode(tree))


def _edit_text(rng: Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return rng.choice(
        [text[:at], text + text, text[:at] + rng.choice(_TEXTS) + text[at:], text.upper(), text + " ", text * 50]
    )


Change = Callable[[Random, bytearray, Sequence[bytes], Sequence[bytes]], bytearray]


def _flip_bit(rng: Random, data: bytearray, _samples: Sequence[bytes], _words: Sequence[bytes]) -> bytearray:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def _set_byte(rng: Random, data: bytearray, _samples: Sequence[bytes], _words: Sequence[bytes]) -> bytearray:
    if data:
        data[rng.randrange(len(data))] = rng.choice(_EDGES)
    return data


def _truncate(rng: Random, data: bytearray, _samples: Sequence[bytes], _words: Sequence[bytes]) -> bytearray:
    return data[: rng.randrange(len(data) + 1)]


def _remove(rng: Random, data: bytearray, _samples: Sequence[bytes], _words: Sequence[bytes]) -> bytearray:
    at = rng.randrange(len(data) + 1)
    del data[at : at + 1 + int(rng.expovariate(0.2))]
    return data


def _insert(rng: Random, data: bytearray, _samples: Sequence[bytes], _words: Sequence[bytes]) -> bytearray:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(1 + int(rng.expovariate(0.2)))
    return data


def _insert_word(rng: Random, data: bytearray, _samples: Sequence[bytes], words: Sequence[bytes]) -> bytearray:
    at = rng.randrange(len(data) + 1)
    word = rng.choice(words) if words else b"\0\0\0\0"
    data[at : at + rng.choice([0, len(word)])] = word
    return data


def _duplicate(rng: Random, data: bytearray, _samples: Sequence[bytes], _words: Sequence[bytes]) -> bytearray:
    begin, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    times = rng.choice([1, 1, 1, 2, 10, 200])
    if (end - begin) * times < MAX_INPUT:
        data[end:end] = data[begin:end] * times
    return data


def _splice(rng: Random, data: bytearray, samples: Sequence[bytes], _words: Sequence[bytes]) -> bytearray:
    other = rng.choice(samples)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _set_number(rng: Random, data: bytearray, _samples: Sequence[bytes], _words: Sequence[bytes]) -> bytearray:
    """Write a length, a count or an edge of a type over some bytes, in either byte order."""
    size = rng.choice(_SIZES)
    if len(data) < size:
        return data
    at = rng.randrange(len(data) - size + 1)
    most = (1 << 8 * size) - 1
    left = len(data) - at
    number = rng.choice(
        [0, 1, 3, 4, 5, most, most >> 1, (most >> 1) + 1, most - 3, left, left - 1, left + 1, left - size, len(data)]
    )
    data[at : at + size] = (number & most).to_bytes(size, rng.choice(_ORDERS))
    return data


def _add_to_number(rng: Random, data: bytearray, _samples: Sequence[bytes], _words: Sequence[bytes]) -> bytearray:
    """Change a number by a little: lengths that are off by a few bytes."""
    size, order = rng.choice((1, 2, 4)), rng.choice(_ORDERS)
    if len(data) < size:
        return data
    at = rng.randrange(len(data) - size + 1)
    number = int.from_bytes(data[at : at + size], order) + rng.randint(-8, 8)
    data[at : at + size] = (number & (1 << 8 * size) - 1).to_bytes(size, order)
    return data


_BYTE_CHANGES: tuple[Change, ...] = (
    _flip_bit,
    _flip_bit,
    _set_byte,
    _set_byte,
    _truncate,
    _remove,
    _insert,
    _insert_word,
    _duplicate,
    _splice,
    _set_number,
    _set_number,
    _add_to_number,
    _add_to_number,
)
