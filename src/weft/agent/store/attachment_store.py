"""What a node must not forget of its workloads: who is attached, how, and what the store knows of it.

Every change is noted before the deed it announces. `AttachmentStore` keeps the notes in memory; the ledger keeps them on disk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from weft.domain import model
from weft.domain.ids import EndpointKey, NetworkKey
from weft.domain.ipam.allocator import NumberSet
from weft.ports.datapath import EndpointConfig


class Stage(StrEnum):
    """How far an attachment has come."""

    # It has its addresses and nothing else. Its ADD was never answered: it is rolled back.
    HELD = "held"
    # The kernel is being told. Its ADD was never answered: it is rolled back.
    WIRING = "wiring"
    ATTACHED = "attached"
    # It is off; the store may not know yet, so its addresses are not free yet.
    LEAVING = "leaving"


# The stages in which a workload has its port, or is just getting it.
WIRED = frozenset({Stage.WIRING, Stage.ATTACHED})


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """One workload's interface: what it has, how it is wired, and whether the store is known to have it."""

    endpoint: model.Endpoint
    published: bool
    stage: Stage
    wiring: EndpointConfig | None = None
    # The CNI network it belongs to, by which GC finds it.
    network_name: str = ""

    @property
    def key(self) -> EndpointKey:
        return self.endpoint.key

    @property
    def handle(self) -> Handle:
        return Handle(self.endpoint.container_id, self.endpoint.interface)


class Handle(NamedTuple):
    """What a runtime identifies an attachment by: never a pod's name."""

    container: str
    interface: str


class AttachmentStore:
    """The notes, in memory."""

    def __init__(self) -> None:
        self._notes: dict[EndpointKey, Attachment] = {}
        self._handles: dict[Handle, EndpointKey] = {}
        self._in_use: defaultdict[tuple[NetworkKey, int], NumberSet] = defaultdict(NumberSet)

    def get(self, key: EndpointKey) -> Attachment | None:
        return self._notes.get(key)

    def find(self, handle: Handle) -> Attachment | None:
        """The attachment that a runtime means."""
        key = self._handles.get(handle)
        return self._notes.get(key) if key else None

    def __iter__(self) -> Iterator[Attachment]:
        return iter(list(self._notes.values()))

    def numbers_in_use(self, network: NetworkKey, family: int) -> NumberSet:
        """The addresses of a network that attachments of any stage have."""
        return self._in_use[network, family]

    def put(self, note: Attachment) -> None:
        """Note an attachment as it is now."""
        self._write([(note.key, note)])
        self._keep(note)

    def note_published(self, keys: Iterable[EndpointKey]) -> None:
        """Note at once that the store has these attachments; those that are forgotten stay so."""
        notes = [msgspec.structs.replace(self._notes[key], published=True) for key in keys if key in self._notes]
        self._write([(note.key, note) for note in notes])
        for note in notes:
            self._keep(note)

    def _keep(self, note: Attachment) -> None:
        before = self._notes.get(note.key)
        self._notes[note.key] = note
        if before is None or before.endpoint is not note.endpoint:
            self._handles[note.handle] = note.key
            for address in note.endpoint.addresses:
                self._in_use[note.endpoint.network_key, address.family].add(address.number)

    def change(
        self,
        key: EndpointKey,
        *,
        stage: Stage | None = None,
        wiring: EndpointConfig | None = None,
        unwired: bool = False,
        network_name: str | None = None,
    ) -> None:
        """Note what is new about an attachment; one that is forgotten stays so."""
        note = self._notes.get(key)
        if note is not None:
            self.put(
                Attachment(
                    endpoint=note.endpoint,
                    published=note.published,
                    stage=stage or note.stage,
                    wiring=None if unwired else wiring or note.wiring,
                    network_name=note.network_name if network_name is None else network_name,
                )
            )

    def forget(self, key: EndpointKey) -> None:
        """Nothing is left of an attachment; forgotten already is fine."""
        note = self._notes.get(key)
        if note is not None:
            self._write([(key, None)])
            del self._notes[key]
            for address in note.endpoint.addresses:
                self._in_use[note.endpoint.network_key, address.family].discard(address.number)
            if self._handles.get(note.handle) == key:
                del self._handles[note.handle]

    def _write(self, news: Sequence[tuple[EndpointKey, Attachment | None]]) -> None:
        """Make it last, all of it or nothing."""
