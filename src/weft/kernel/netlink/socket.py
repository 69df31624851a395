"""A netlink socket: batch requests in one datagram, match replies by sequence number, report extended ACKs.

The kernel processes a datagram inside `send`: when it returns, all requests are done and the replies are queued. Only
the last request of a datagram carries NLM_F_ACK; the others reply only when they fail.

A socket belongs to the network namespace it was opened in, and to one thread at a time.
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
from weft.kernel.netlink.codec import NLMSGHDR, Message, Request, attributes, messages, to_text, unpack_header
from weft.kernel.netns import Namespace
from weft.kernel.uapi.netlink import (
    NETLINK_ADD_MEMBERSHIP,
    NETLINK_CAP_ACK,
    NETLINK_EXT_ACK,
    NETLINK_GET_STRICT_CHK,
    NLM_F_ACK,
    NLM_F_ACK_TLVS,
    NLM_F_CAPPED,
    NLM_F_DUMP,
    NLM_F_DUMP_INTR,
    NLMSG_DONE,
    NLMSG_ERROR,
    NLMSGERR_ATTR_MSG,
    SO_RCVBUFFORCE,
    SO_SNDBUFFORCE,
    SOL_NETLINK,
)

# Seconds to wait for a reply (SO_RCVTIMEO). Replies are queued before we read, so this only bounds a kernel bug.
_DEADLINE = 10

# A transaction of 10,000 elements is about 1 MiB; the default send buffer of 200 KiB would refuse it.
_SEND_BUFFER, _RECEIVE_BUFFER = 8 << 20, 2 << 20
_LARGEST_DATAGRAM = 1 << 16

_RECV_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_TRUNC)
# PyDLL keeps the GIL during the call: reading a queued reply takes less time than handing the GIL over.
_LIBC_WITH_GIL = ctypes.PyDLL(None, use_errno=True)
_LIBC_WITH_GIL.recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC_WITH_GIL.recv.restype = ctypes.c_ssize_t

_ERRNO = struct.Struct("=i")
# nlmsg_len, the first member of a message header.
_LENGTH = struct.Struct("=I")

# Bounded so that the replies fit into the receive buffer even if every request of a batch fails.
_BATCH_BYTES, _BATCH_REQUESTS = 1 << 16, 256
# A dump is inconsistent when the table changes meanwhile (NLM_F_DUMP_INTR); it is repeated at most so often.
_DUMP_TRIES = 20
_SEQUENCE_MASK = 0xFFFFFFFF


class _ReceiveBuffer(threading.local):
    """One receive buffer per thread, allocated once."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_LARGEST_DATAGRAM)


_RECEIVE = _ReceiveBuffer()


class NetlinkError(DatapathFault):
    """The kernel rejected a request: the errno, its extended ACK message, and the request's position in the batch."""

    def __init__(self, request: Request, *, number: int, extack: str, position: int) -> None:
        symbol = errno.errorcode.get(number, str(number))
        message = f"{request}: {extack or _strerror(number)} ({symbol})"
        super().__init__(message, details={"errno": symbol, "position": position})
        self.request = request
        self.errno = number
        self.position = position


class NetlinkSocket:
    """An open socket of one netlink protocol (`NETLINK_ROUTE`, `NETLINK_NETFILTER`) in one network namespace."""

    def __init__(self, protocol: int, *, namespace: Namespace, home: Namespace | None = None) -> None:
        self._socket = namespace.open_socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol, home=home)
        self._sequence = 0
        # nf_tables transactions committed through this socket. The kernel's generation counter grows by one for each,
        # so a larger generation means that another process changed the ruleset.
        self.transactions = 0
        try:
            _configure(self._socket)
        except OSError as error:
            self._socket.close()
            raise _fault(f"netlink in {namespace.name}", error) from error

    def send_batch(self, requests: Sequence[Request]) -> None:
        """Send requests in order; raise `NetlinkError` for the first that failed.

        This is not a transaction: the kernel also processes the requests after a failed one.
        """
        first_error: NetlinkError | None = None
        for start, batch in _batches(requests):
            try:
                self._exchange(batch, confirmed=len(batch) - 1, start=start)
            except NetlinkError as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def send_transaction(self, requests: Sequence[Request], *, begin: Request, end: Request) -> None:
        """Apply all of the requests or, on `NetlinkError`, none. Only nf_tables has transactions."""
        self._exchange([begin, *requests, end], confirmed=len(requests), start=-1)
        self.transactions += 1

    def get(self, request: Request) -> bytes | None:
        """Return the one reply to a request, or None when it fails with one of its ignored errnos."""
        first = self._send([request], flags=0, confirmed=0)
        while True:
            for message in self._receive(request):
                if message.sequence != first:
                    continue
                if message.kind != NLMSG_ERROR:
                    return message.payload
                _check(message, request)
                return None

    def dump(self, request: Request) -> list[bytes]:
        """Return all replies of a consistent dump; repeat it when the kernel reports NLM_F_DUMP_INTR.

        Empty when the request fails with one of its ignored errnos.
        """
        for _ in range(_DUMP_TRIES):
            replies = self._dump_once(request)
            if replies is not None:
                return replies
        raise DatapathFault(f"{request}: dump interrupted by changes {_DUMP_TRIES} times")

    def read_notifications(self, *, most: int) -> Iterator[Message]:
        """Read queued notifications from at most `most` datagrams, without waiting.

        ENOBUFS means that the receive buffer overflowed: some are lost, the rest is read.
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

    def join_group(self, group: int) -> None:
        """Subscribe to a multicast group, such as RTNLGRP_LINK."""
        try:
            self._socket.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)
        except OSError as error:
            raise _fault(f"join group {group}", error) from error

    def wait(self, *, within: float) -> None:
        """Return when a notification is queued or `within` seconds have passed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll(within * 1000)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, requests: Sequence[Request], *, confirmed: int, start: int) -> None:
        """Send one datagram and read replies up to the ACK or the first error.

        Replies after an error stay queued; the next call skips them by their sequence numbers.
        """
        first = self._send(requests, flags=NLM_F_ACK, confirmed=confirmed)
        while True:
            for message in self._receive(requests[confirmed]):
                position = message.sequence - first & _SEQUENCE_MASK
                if position >= len(requests):
                    continue
                _check(message, requests[position], position=start + position)
                if position == confirmed:
                    return

    def _dump_once(self, request: Request) -> list[bytes] | None:
        first = self._send([request], flags=NLM_F_DUMP, confirmed=0)
        replies: list[bytes] = []
        interrupted = False
        while True:
            for message in self._receive(request):
                if message.sequence != first:
                    continue
                interrupted |= bool(message.flags & NLM_F_DUMP_INTR)
                if message.kind in (NLMSG_ERROR, NLMSG_DONE):
                    _check(message, request)
                    return None if interrupted else replies
                replies.append(message.payload)

    def _send(self, requests: Sequence[Request], *, flags: int, confirmed: int) -> int:
        """Send one datagram and return the first sequence number; `flags` go with the confirmed request only."""
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
        """Read the next datagram, which is queued already as a rule."""
        buffer = _RECEIVE.buffer
        size = _LIBC_WITH_GIL.recv(self._socket.fileno(), buffer, _LARGEST_DATAGRAM, _RECV_FLAGS)
        try:
            if size < 0 and (number := ctypes.get_errno()) != errno.EAGAIN:
                raise OSError(number, os.strerror(number))
            if size < 0:
                size = self._socket.recv_into(buffer, _LARGEST_DATAGRAM, socket.MSG_TRUNC)
        except OSError as error:
            raise _fault(request, error) from error
        if size > _LARGEST_DATAGRAM:
            raise DatapathFault(f"{request}: reply larger than {_LARGEST_DATAGRAM} bytes")
        return messages(ctypes.string_at(buffer, size))


def _strerror(number: int) -> str:
    try:
        return os.strerror(number)
    except OverflowError:  # no errno: -2**31 of a broken message, whose negation is no C int
        return "unknown error"


def _fault(action: object, error: OSError) -> DatapathFault:
    if isinstance(error, BlockingIOError):
        return DatapathFault(f"{action}: no reply within {_DEADLINE} s")
    return DatapathFault(f"{action}: {error.strerror}")


def _configure(opened: socket.socket) -> None:
    for option in (NETLINK_CAP_ACK, NETLINK_EXT_ACK, NETLINK_GET_STRICT_CHK):
        opened.setsockopt(SOL_NETLINK, option, 1)
    opened.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, _SEND_BUFFER)
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, _RECEIVE_BUFFER)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _DEADLINE, 0))
    # Port id 0 is the kernel. A connected socket accepts no messages from other processes.
    opened.connect((0, 0))


def _batches(requests: Sequence[Request]) -> Iterator[tuple[int, Sequence[Request]]]:
    """Split requests into datagrams, by size and by number."""
    start = size = 0
    for position, request in enumerate(requests):
        length = NLMSGHDR.size + len(request.payload)
        if position > start and (size + length > _BATCH_BYTES or position - start == _BATCH_REQUESTS):
            yield start, requests[start:position]
            start, size = position, 0
        size += length
    if start < len(requests):
        yield start, requests[start:]


def _check(message: Message, request: Request, *, position: int = 0) -> None:
    """Raise `NetlinkError` unless the message reports success or an ignored errno."""
    (result,) = unpack_header(_ERRNO, message.payload) if message.payload else (0,)
    if result == 0 or -result in request.ignored_errnos:
        return
    raise NetlinkError(request, number=-result, extack=_extack_message(message), position=position)


def _extack_message(message: Message) -> str:
    """Return the text of the extended ACK (NLMSGERR_ATTR_MSG), if there is one."""
    if not message.flags & NLM_F_ACK_TLVS:
        return ""
    offset = _ERRNO.size
    if message.kind == NLMSG_ERROR:
        # An error quotes the request before the attributes; a capped one only its header.
        (size,) = unpack_header(_LENGTH, message.payload[offset:])
        offset += NLMSGHDR.size if message.flags & NLM_F_CAPPED else size + 3 & ~3
    return to_text(attributes(message.payload, offset).get(NLMSGERR_ATTR_MSG))
