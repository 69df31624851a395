"""State machines: streams that arrive in any pieces, and an attachment log that is torn, flipped and reopened."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.fuzz.inputs import collect, finish, pieces

from weft.adapters.ovs.ovsdb.jsonrpc import Incoming
from weft.adapters.stores.etcd_gateway import _lines
from weft.agent.store.attachment_store import Attachment, AttachmentWal, Stage
from weft.domain import model
from weft.domain.errors import DatapathFault, Unavailable
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, StoreKey, TenantName
from weft.domain.store_types import Change, Event
from weft.runtime.store import wire

EXAMPLES = settings(max_examples=25, stateful_step_count=25)
NAMES = st.sampled_from(["a", "b", "c", "d"])


class StreamMachine(RuleBasedStateMachine):
    """Valid messages of three protocols in a row. However they are cut, the same messages come out."""

    def __init__(self) -> None:
        super().__init__()
        self._frames: list[wire.Frame] = []
        self._texts: list[str] = []

    @rule(revision=st.integers(1, 99), value=st.binary(max_size=40) | st.none())
    def change(self, revision: int, value: bytes | None) -> None:
        self._frames.append(wire.Frame(change=Change(revision, (Event(StoreKey("k"), value),))))

    @rule(text=st.text(max_size=20))
    def message(self, text: str) -> None:
        self._texts.append(text)

    @rule(size=st.integers(1, 50))
    def frames_in_pieces(self, size: int) -> None:
        data = wire.HEARTBEAT_FRAME.join(map(wire.framed, self._frames))
        assert finish(collect(wire.frames(pieces(data, size)))) == self._frames

    @rule(size=st.integers(1, 50))
    def lines_in_pieces(self, size: int) -> None:
        lines = [msgspec.json.encode(text) for text in self._texts]
        assert finish(collect(_lines(pieces(b"\n".join(lines), size)))) == lines

    @rule(size=st.integers(1, 50))
    def replies_in_pieces(self, size: int) -> None:
        incoming, data = Incoming(), b" ".join(msgspec.json.encode({"id": 1, "result": text}) for text in self._texts)
        found = [each.result for at in range(0, len(data), size) for each in incoming.feed(data[at : at + size])]
        assert found == self._texts

    @rule(at=st.integers(0, 1 << 16), bit=st.integers(0, 7), size=st.integers(1, 50))
    def one_bit_is_wrong(self, at: int, bit: int, size: int) -> None:
        """A peer that errs costs its own connection: other messages, or the declared error."""
        readers: list[tuple[bytes, Callable[[AsyncIterator[bytes]], object]]] = [
            (b"".join(map(wire.framed, self._frames)), lambda stream: finish(collect(wire.frames(stream)))),
            (b"".join(msgspec.json.encode({"result": text}) for text in self._texts), _feed_all),
        ]
        for data, read in readers:
            if data:
                broken = bytearray(data)
                broken[at % len(data)] ^= 1 << bit
                try:
                    read(pieces(bytes(broken), size))
                except (Unavailable, DatapathFault):
                    continue


def _feed_all(stream: AsyncIterator[bytes]) -> None:
    async def feed() -> None:
        incoming = Incoming()
        async for piece in stream:
            incoming.feed(piece)

    finish(feed())


class AttachmentLogMachine(RuleBasedStateMachine):
    """Records come and go, the agent restarts, and sometimes the disk errs. A restart never fails.

    Without damage all records are there. With damage no record appears that was never written.
    """

    def __init__(self) -> None:
        super().__init__()
        logging.disable()
        self._folder = Path(tempfile.mkdtemp(prefix="weft-fuzz-"))
        self._path = self._folder / "attachments"
        self._wanted: dict[EndpointKey, Attachment] = {}
        self._written: set[tuple[EndpointKey, Stage]] = set()
        self._is_damaged = False

    @initialize()
    def open(self) -> None:
        self._wal = AttachmentWal(self._path, boot="boot")

    @rule(name=NAMES, stage=st.sampled_from([Stage.CONFIGURING, Stage.ATTACHED, Stage.DELETING]))
    def put(self, name: str, stage: Stage) -> None:
        endpoint = model.Endpoint(
            tenant=TenantName("t"), network=NetworkName("n"), endpoint_id=EndpointId(name), container_id=name,
            ip_address="10.1.1.1", interface="eth0",
        )  # fmt: skip
        attachment = Attachment(endpoint=endpoint, published=True, stage=stage)
        self._wal.put(attachment)
        self._wanted[attachment.key] = attachment
        self._written.add((attachment.key, stage))

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        key = EndpointKey(TenantName("t"), NetworkName("n"), EndpointId(name))
        self._wal.delete(key)
        self._wanted.pop(key, None)

    @rule(torn=st.binary(max_size=60).filter(lambda data: b"\n" not in data))
    def kill_within_a_write(self, torn: bytes) -> None:
        self._wal.close()
        with self._path.open("ab") as file:
            file.write(torn)
        self.open()

    @rule(at=st.integers(0, 1 << 16), bit=st.integers(0, 7))
    def flip_a_bit(self, at: int, bit: int) -> None:
        self._wal.close()
        data = bytearray(self._path.read_bytes())
        begin = data.index(b"\n") + 1  # a damaged header is refused as another format, or costs the boot
        if begin < len(data):
            data[begin + at % (len(data) - begin)] ^= 1 << bit
            self._path.write_bytes(data)
            self._is_damaged = True
        self.open()
        if self._is_damaged:
            self._wanted = {attachment.key: attachment for attachment in self._wal}

    @invariant()
    def records_are_those_that_were_written(self) -> None:
        found = {attachment.key: attachment for attachment in getattr(self, "_wal", ())}
        assert {(key, attachment.stage) for key, attachment in found.items()} <= self._written
        assert found == self._wanted

    def teardown(self) -> None:
        if hasattr(self, "_wal"):
            self._wal.close()
        shutil.rmtree(self._folder)
        logging.disable(logging.NOTSET)


TestStreams = StreamMachine.TestCase
TestStreams.settings = EXAMPLES
TestAttachmentLog = AttachmentLogMachine.TestCase
TestAttachmentLog.settings = EXAMPLES
