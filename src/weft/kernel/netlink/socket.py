"""A netlink socket: many requests in one datagram, answers matched by number, refusals with the kernel's own words.

The kernel works through a datagram while it is being sent: when that returns, all is done and the answers wait. Only
the last request of a datagram asks to be confirmed; the others answer only when they are refused.

A socket belongs to the namespace it was opened in, and to one thread at a time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from weft.domain.errors import DatapathFault
from weft.kernel.netlink.codec import ACK, DUMP, HEADER, Message, Request, attributes, messages, to_text, unpack_header
from weft.kernel.netns import Namespace

ROUTE, NETFILTER = 0, 12

# Seconds to wait for an answer. It waits already when we come to read it, so this only ends the impossible.
_DEADLINE = 10

_SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1
_CAP_ACK, _EXT_ACK, _STRICT_CHECK = 10, 11, 12
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_SEND_SPACE, _RECEIVE_SPACE = 8 << 20, 2 << 20
_LARGEST_DATAGRAM = 1 << 16

_NOW = int(socket.MSG_DONTWAIT | socket.MSG_TRUNC)
# To read an answer that waits takes less than to let other threads go on meanwhile.
_BRIEF = ctypes.PyDLL(None, use_errno=True)
_BRIEF.recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_BRIEF.recv.restype = ctypes.c_ssize_t

_ERROR, _DONE = 2, 3
_INTERRUPTED, _CAPPED, _HAS_WORDS = 0x10, 0x100, 0x200
_WORDS = 1
_ERRNO = struct.Struct("=i")

_BATCH_BYTES, _BATCH_REQUESTS = 1 << 16, 256
_DUMP_TRIES = 20
_SEQUENCE_MASK = 0xFFFFFFFF


class _ReceiveBuffer(threading.local):
    """Where a thread puts a datagram until it has looked at it."""

    def __init__(self) -> None:
        self.space = ctypes.create_string_buffer(_LARGEST_DATAGRAM)


_DESK = _ReceiveBuffer()


class NetlinkError(DatapathFault):
    """The kernel refused a request: which of those that were sent, and with what errno."""

    def __init__(self, request: Request, *, number: int, words: str, position: int) -> None:
        symbol = errno.errorcode.get(number, str(number))
        message = f"{request}: {words or os.strerror(number)} ({symbol})"
        super().__init__(message, details={"errno": symbol, "position": position})
        self.request = request
        self.errno = number
        self.position = position


class NetlinkSocket:
    """An open socket to one part of the kernel (`ROUTE`, `NETFILTER`) in one namespace."""

    def __init__(self, protocol: int, *, namespace: Namespace, home: Namespace | None = None) -> None:
        self._socket = namespace.open_socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol, home=home)
        self._sequence = 0
        # How many have been carried out.
        self.transactions = 0
        try:
            _set_up(self._socket)
        except OSError as error:
            self._socket.close()
            raise _fault(f"netlink in {namespace.name}", error) from error

    def send_batch(self, requests: Sequence[Request]) -> None:
        """Carry out the requests in order; `NetlinkError` tells the first that failed.

        This is no transaction: what comes after a refused request is carried out all the same.
        """
        first_refusal: NetlinkError | None = None
        for start, batch in _batches(requests):
            try:
                self._exchange(batch, confirmed=len(batch) - 1, start=start)
            except NetlinkError as refusal:
                first_refusal = first_refusal or refusal
        if first_refusal is not None:
            raise first_refusal

    def send_transaction(self, requests: Sequence[Request], *, begin: Request, end: Request) -> None:
        """Carry out all of the requests or, when one is `NetlinkError`, none. Only nf_tables has such frames."""
        self._exchange([begin, *requests, end], confirmed=len(requests), start=-1)
        self.transactions += 1

    def get(self, request: Request) -> bytes | None:
        """The one answer to a question, or `None` when it is refused with an errno that the request calls settled."""
        first = self._send([request], flags=0, confirmed=0)
        while True:
            for message in self._receive(request):
                if message.sequence != first:
                    continue
                if message.kind != _ERROR:
                    return message.payload
                _check(message, request)
                return None

    def dump(self, request: Request) -> list[bytes]:
        """All answers to a question, as of one moment: it is asked anew when the kernel says that they are not.

        None when the question is refused with an errno that it calls settled.
        """
        for _ in range(_DUMP_TRIES):
            answers = self._dump_once(request)
            if answers is not None:
                return answers
        raise DatapathFault(f"{request}: all {_DUMP_TRIES} readings were disturbed by changes")

    def read_unasked(self, *, most: int) -> Iterator[Message]:
        """Messages that the kernel has sent of its own accord, from at most so many datagrams; waits for none.

        What did not fit into the receive space is lost, and the rest is read all the same.
        """
        for _ in range(most):
            try:
                data = self._socket.recv(_LARGEST_DATAGRAM, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise _fault("read messages", error) from error
            else:
                yield from messages(data)

    def join(self, group: int) -> None:
        """From now on what the kernel tells a group comes unasked too."""
        try:
            self._socket.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
        except OSError as error:
            raise _fault(f"join group {group}", error) from error

    def wait(self, *, within: float) -> None:
        """Return when something has come unasked, or so many seconds have passed."""
        news = select.poll()
        news.register(self._socket, select.POLLIN)
        news.poll(within * 1000)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, requests: Sequence[Request], *, confirmed: int, start: int) -> None:
        """Send one datagram and read its answers up to the confirmation or the first refusal.

        Answers after a refusal stay unread; the next call passes over them by their numbers.
        """
        first = self._send(requests, flags=ACK, confirmed=confirmed)
        while True:
            for message in self._receive(requests[confirmed]):
                position = message.sequence - first & _SEQUENCE_MASK
                if position >= len(requests):
                    continue
                _check(message, requests[position], position=start + position)
                if position == confirmed:
                    return

    def _dump_once(self, request: Request) -> list[bytes] | None:
        first = self._send([request], flags=DUMP, confirmed=0)
        answers: list[bytes] = []
        interrupted = False
        while True:
            for message in self._receive(request):
                if message.sequence != first:
                    continue
                interrupted |= bool(message.flags & _INTERRUPTED)
                if message.kind in (_ERROR, _DONE):
                    _check(message, request)
                    return None if interrupted else answers
                answers.append(message.payload)

    def _send(self, requests: Sequence[Request], *, flags: int, confirmed: int) -> int:
        """The number of the first request; `flags` go with the confirmed one only."""
        first = self._sequence
        self._sequence = first + len(requests) & _SEQUENCE_MASK
        datagram = b"".join(
            request.encode(sequence=first + position & _SEQUENCE_MASK, flags=flags if position == confirmed else 0)
            for position, request in enumerate(requests)
        )
        try:
            self._socket.send(datagram)
        except OSError as error:
            raise _fault(requests[confirmed], error) from error
        return first

    def _receive(self, request: Request) -> Iterator[Message]:
        """The messages of the next datagram, which waits already, as a rule."""
        space = _DESK.space
        size = _BRIEF.recv(self._socket.fileno(), space, _LARGEST_DATAGRAM, _NOW)
        try:
            if size < 0 and (number := ctypes.get_errno()) != errno.EAGAIN:
                raise OSError(number, os.strerror(number))
            if size < 0:
                size = self._socket.recv_into(space, _LARGEST_DATAGRAM, socket.MSG_TRUNC)
        except OSError as error:
            raise _fault(request, error) from error
        if size > _LARGEST_DATAGRAM:
            raise DatapathFault(f"{request}: the answer is larger than {_LARGEST_DATAGRAM} bytes")
        return messages(ctypes.string_at(space, size))


def _fault(doing: object, error: OSError) -> DatapathFault:
    if isinstance(error, BlockingIOError):
        return DatapathFault(f"{doing}: no answer within {_DEADLINE} s")
    return DatapathFault(f"{doing}: {error.strerror}")


def _set_up(opened: socket.socket) -> None:
    for option in (_CAP_ACK, _EXT_ACK, _STRICT_CHECK):
        opened.setsockopt(_SOL_NETLINK, option, 1)
    opened.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_SPACE)
    opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_SPACE)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _DEADLINE, 0))
    # Connected to the kernel, it hears nothing from other processes.
    opened.connect((0, 0))


def _batches(requests: Sequence[Request]) -> Iterator[tuple[int, Sequence[Request]]]:
    """Parts that fit into one datagram, and whose answers fit into the receive space even if all are refused."""
    start = size = 0
    for position, request in enumerate(requests):
        length = HEADER.size + len(request.payload)
        if position > start and (size + length > _BATCH_BYTES or position - start == _BATCH_REQUESTS):
            yield start, requests[start:position]
            start, size = position, 0
        size += length
    if start < len(requests):
        yield start, requests[start:]


def _check(message: Message, request: Request, *, position: int = 0) -> None:
    """Raise `NetlinkError` unless the message says that all is well or settled."""
    (result,) = unpack_header(_ERRNO, message.payload) if message.payload else (0,)
    if result == 0 or -result in request.settled:
        return
    raise NetlinkError(request, number=-result, words=_words(message), position=position)


def _words(message: Message) -> str:
    """What the kernel has to say beyond the errno. The request itself, or only its header, comes before."""
    if not message.flags & _HAS_WORDS:
        return ""
    offset = _ERRNO.size
    if message.kind == _ERROR:
        (size,) = unpack_header(_ERRNO, message.payload[offset:])
        offset += HEADER.size if message.flags & _CAPPED else size + 3 & ~3
    return to_text(attributes(message.payload, offset).get(_WORDS))
