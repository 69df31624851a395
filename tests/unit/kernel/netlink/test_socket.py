"""What the socket makes of answers that a healthy kernel seldom gives. The lab has the real ones."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Callable
from typing import cast

import pytest

from weft.domain.errors import DatapathFault
from weft.kernel.netlink.codec import NLMSGHDR, Message, Request, attribute, messages, text
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket
from weft.kernel.netns import Namespace
from weft.kernel.uapi.netlink import NETLINK_ROUTE

ERROR, DONE, ROW = 2, 3, 24
INTERRUPTED, CAPPED, HAS_WORDS = 0x10, 0x100, 0x200

# A descriptor at which nobody speaks.
SILENT = socket.socket(type=socket.SOCK_DGRAM).detach()

Answer = bytes | OSError
ASK = Request(26, 0, b"", "read", "routes")
ADD = Request(24, 0, b"", "add route", "home", frozenset({errno.EEXIST}))


class Kernel:
    """A socket at whose other end a script answers: for each datagram that is sent, datagrams or errors to read.

    Its descriptor has nothing to read at once, so that the socket is waited for.
    """

    def __init__(self, script: Callable[[list[Message]], list[Answer]]) -> None:
        self._script = script
        self._waiting: list[Answer] = []
        self.asked = 0

    def setsockopt(self, *_: object) -> None: ...

    def connect(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def fileno(self) -> int:
        return SILENT

    def send(self, data: bytes) -> int:
        self.asked += 1
        self._waiting += self._script(list(messages(data)))
        return len(data)

    def recv_into(self, space: ctypes.Array[ctypes.c_char], size: int, flags: int) -> int:
        assert flags == socket.MSG_TRUNC
        answer = self._waiting.pop(0)
        if isinstance(answer, OSError):
            raise answer
        ctypes.memmove(space, answer, min(len(answer), size))
        return len(answer)

    def recv(self, size: int, flags: int) -> bytes:
        assert flags == socket.MSG_DONTWAIT
        if not self._waiting:
            raise BlockingIOError
        answer = self._waiting.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer[:size]

    def tell(self, *unasked: Answer) -> None:
        """Say something of its own accord."""
        self._waiting += unasked


class Somewhere(Namespace):
    """A namespace in which every socket leads to the script."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(-1, name="somewhere")
        self._kernel = kernel

    def open_socket(self, family: int, kind: int, protocol: int = 0, *, home: Namespace | None = None) -> socket.socket:
        return cast("socket.socket", self._kernel)


def opened(kernel: Kernel) -> NetlinkSocket:
    return NetlinkSocket(NETLINK_ROUTE, namespace=Somewhere(kernel))


def answer(to: Message, kind: int, payload: bytes, flags: int = 0) -> bytes:
    return NLMSGHDR.pack(NLMSGHDR.size + len(payload), kind, flags, to.sequence, 0) + payload + bytes(-len(payload) % 4)


def refusal(to: Message, number: int, extra: bytes = b"", flags: int = CAPPED) -> bytes:
    request = NLMSGHDR.pack(NLMSGHDR.size + len(to.payload), to.kind, to.flags, to.sequence, 0)
    return answer(to, ERROR, struct.pack("=i", -number) + request + extra, flags)


def end(to: Message, number: int = 0, flags: int = 0) -> bytes:
    return answer(to, DONE, struct.pack("=i", -number), flags)


def test_an_interrupted_dump_is_repeated() -> None:
    tries = 0

    def script(asked: list[Message]) -> list[Answer]:
        nonlocal tries
        tries += 1
        flags = INTERRUPTED if tries < 3 else 0
        row = answer(asked[0], ROW, tries.to_bytes(4, "big"), flags)
        return [row + row, end(asked[0])]

    assert opened(Kernel(script)).dump(ASK) == [bytes([0, 0, 0, 3])] * 2
    assert tries == 3


def test_a_dump_that_is_always_interrupted_fails() -> None:
    kernel = Kernel(lambda asked: [end(asked[0], flags=INTERRUPTED)])
    with pytest.raises(DatapathFault, match="interrupted"):
        opened(kernel).dump(ASK)
    assert 1 < kernel.asked < 100


def test_a_reading_can_fail_at_its_end() -> None:
    kernel = Kernel(lambda asked: [answer(asked[0], ROW, b"half"), end(asked[0], errno.ENOMEM)])
    with pytest.raises(NetlinkError) as refused:
        opened(kernel).dump(ASK)
    assert refused.value.errno == errno.ENOMEM


def test_words_after_the_whole_request_and_after_its_header_only() -> None:
    def script(asked: list[Message]) -> list[Answer]:
        words = text(1, "No way")
        whole = refusal(asked[0], errno.EINVAL, asked[0].payload + words, HAS_WORDS)
        return [whole if asked[0].payload else refusal(asked[0], errno.EINVAL, words, CAPPED | HAS_WORDS)]

    netlink = opened(Kernel(script))
    for payload in (b"", attribute(1, b"12345678")):
        with pytest.raises(NetlinkError) as refused:
            netlink.send_batch([Request(24, 0, payload, "add route", "home")])
        assert refused.value.message == "add route home: No way (EINVAL)"


def test_an_errno_without_a_name_is_still_told() -> None:
    netlink = opened(Kernel(lambda asked: [refusal(asked[0], 524)]))
    with pytest.raises(NetlinkError, match=r"\(524\)"):
        netlink.send_batch([ADD])


def test_settled_refusals_are_passed_over_the_last_one_too() -> None:
    def script(asked: list[Message]) -> list[Answer]:
        return [refusal(message, errno.EEXIST) for message in asked]

    opened(Kernel(script)).send_batch([ADD] * 3)


def test_only_the_last_of_a_batch_is_asked_to_answer() -> None:
    flags: list[int] = []

    def script(asked: list[Message]) -> list[Answer]:
        flags.extend(message.flags for message in asked)
        return [refusal(asked[-1], 0)]

    opened(Kernel(script)).send_batch([ADD] * 3)
    assert flags == [1, 1, 5]


def test_answers_to_others_are_passed_over() -> None:
    def script(asked: list[Message]) -> list[Answer]:
        foreign = asked[0]._replace(sequence=asked[0].sequence + 1000)
        return [refusal(foreign, errno.EPERM), answer(foreign, ROW, b"none of ours"), refusal(asked[-1], 0)]

    opened(Kernel(script)).send_batch([ADD])


def test_sequence_numbers_wrap_around() -> None:
    netlink = opened(Kernel(lambda asked: [refusal(asked[-1], 0)]))
    netlink._sequence = 0xFFFFFFFE
    for _ in range(3):
        netlink.send_batch([ADD] * 3)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "no reply"),
        (OSError(errno.ENOBUFS, "No buffer space available"), "No buffer space"),
        (bytes(1 << 17), "larger than"),
        (b"\xff" * 20, "exceeds"),
        (b"\xff" * 3, "trailing bytes"),
    ],
)
def test_no_answer_and_nonsense_are_faults(failure: Answer, words: str) -> None:
    with pytest.raises(DatapathFault, match=words):
        opened(Kernel(lambda _: [failure])).send_batch([ADD])


def test_the_frame_of_a_transaction_can_be_refused_itself() -> None:
    """Nothing else answers then, and nothing is waited for."""
    frame = Request(16, 0, bytes(4), "change", "nf_tables")
    netlink = opened(Kernel(lambda asked: [refusal(asked[0], errno.EPERM)]))
    with pytest.raises(NetlinkError) as refused:
        netlink.send_transaction([ADD, ADD], begin=frame, end=frame)
    assert refused.value.errno == errno.EPERM


NEWS = NLMSGHDR.pack(NLMSGHDR.size + 4, 0x400, 0, 0, 0) + b"news"


def test_what_is_said_unasked_is_read_until_there_is_no_more() -> None:
    """Also beyond a gap: what did not fit into the socket is lost, and no more than that."""
    kernel = Kernel(lambda _: [])
    netlink = opened(kernel)
    assert list(netlink.read_notifications(most=10)) == []
    kernel.tell(NEWS + NEWS, OSError(errno.ENOBUFS, "full"), NEWS)
    assert [message.payload for message in netlink.read_notifications(most=10)] == [b"news"] * 3


def test_reading_what_is_said_unasked_is_bounded() -> None:
    kernel = Kernel(lambda _: [])
    kernel.tell(*[NEWS] * 5)
    netlink = opened(kernel)
    assert len(list(netlink.read_notifications(most=2))) == 2
    assert len(list(netlink.read_notifications(most=10))) == 3


def test_a_socket_that_fails_is_a_fault() -> None:
    kernel = Kernel(lambda _: [])
    kernel.tell(OSError(errno.EBADF, "closed"))
    with pytest.raises(DatapathFault, match="closed"):
        list(opened(kernel).read_notifications(most=1))
