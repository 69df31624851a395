"""Writers that number their commits, and a ledger that notices every commit that is lost, doubled or half done.

As a program (`python -m tests.support.store_load DRIVER SETTINGS WRITERS`) it opens a store and writes until it is killed,
printing `opening`, `open`, and each commit that was acknowledged.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec

from weft.domain.errors import Stale, Unavailable
from weft.domain.ids import StoreKey
from weft.drivers import StoreSettings, open_store
from weft.lab.servers.processes import Child
from weft.lab.waiting import until
from weft.ports.store import NEVER, Change, Put, Revision, RevisionEquals, Store

Acknowledge = Callable[["Commit"], None]


class Commit(NamedTuple):
    """The commit with this number of a writer; the numbers of one writer have no gaps."""

    writer: str
    number: int
    revision: Revision

    def __str__(self) -> str:
        return f"{self.writer} {self.number} {self.revision}"

    @classmethod
    def parse(cls, text: str) -> Commit:
        writer, number, revision = text.split()
        return cls(writer, int(number), int(revision))


def _halves(writer: str) -> tuple[StoreKey, StoreKey]:
    """The two keys that each commit of a writer puts."""
    return StoreKey(f"{writer}/one"), StoreKey(f"{writer}/two")


async def write_on(store: Store, writer: str, acknowledge: Acknowledge) -> None:
    """Commit one number after another, for ever. `writer` is a key's beginning; nobody else may write there.

    Each commit puts its number to two keys, and compares that the previous one is there. When a commit's fate is
    unknown, the store is asked before the next, so that none happens twice.
    """
    one, two = _halves(writer)
    number, revision = 0, NEVER
    known = False
    while True:
        try:
            if not known:
                entry = await store.read(one)
                number, revision = (int(entry.value), entry.revision) if entry else (0, NEVER)
                known = True
            value = b"%d" % (number + 1)
            revision = await store.commit(
                [RevisionEquals(one, revision), RevisionEquals(two, revision)], [Put(one, value), Put(two, value)]
            )
        except (Unavailable, Stale):
            known = False  # Stale: a commit of unknown fate happened after all, and late
            continue
        number += 1
        acknowledge(Commit(writer, number, revision))


class CommitLog:
    """What a watch has shown of the writers, checked as it comes."""

    def __init__(self) -> None:
        self.revision: Revision = NEVER
        self._last: dict[str, int] = {}
        self._found: dict[tuple[str, int], Revision] = {}

    def take(self, change: Change) -> None:
        """The next change. Fails when a commit is missing, comes twice or is not whole."""
        assert change.revision > self.revision, f"revision {change.revision} came after {self.revision}"
        self.revision = change.revision
        puts = {event.key: event.value for event in change.events}
        assert len(puts) == len(change.events), f"revision {change.revision} has a key twice"
        for writer in {key.rpartition("/")[0] for key in puts}:
            one, two = (puts.pop(key, None) for key in _halves(writer))
            assert one is not None, f"revision {change.revision} has half a commit of {writer}"
            assert one == two, f"revision {change.revision} has {one!r} and {two!r} of {writer}"
            number = int(one)
            assert number == self._last.get(writer, 0) + 1, (
                f"{writer} went from {self._last.get(writer, 0)} to {number}"
            )
            self._last[writer] = number
            self._found[writer, number] = change.revision
        assert not puts, f"revision {change.revision} has keys of nobody: {sorted(puts)}"

    async def reaches(self, revision: Revision) -> None:
        """Return when it has come so far."""
        await until(lambda: self.revision >= revision)

    def check(self, acknowledged: Commit) -> None:
        """Fails when a commit that was acknowledged has not happened as it was."""
        found = self._found.get((acknowledged.writer, acknowledged.number))
        assert found == acknowledged.revision, f"acknowledged {acknowledged}, found at revision {found}"

    def check_present(self, values: dict[StoreKey, bytes]) -> None:
        """Fails when the store's present state is not what its changes have made of it."""
        wanted = {key: b"%d" % number for writer, number in self._last.items() for key in _halves(writer)}
        assert values == wanted

    @property
    def commits(self) -> int:
        """How many there were."""
        return len(self._found)


async def _main(settings: StoreSettings, writers: list[str]) -> None:
    def say(line: object) -> None:
        os.write(1, f"{line}\n".encode())  # at once: what is acknowledged must be known before we die

    say("opening")
    async with open_store(settings) as store, asyncio.TaskGroup() as tasks:
        say("open")
        for writer in writers:
            tasks.create_task(write_on(store, writer, say))


def stress_process(settings: StoreSettings, writers: Sequence[str], *, log: Path) -> Child:
    """This program, running."""
    return Child.python(
        "tests.support.store_load", settings.driver, msgspec.json.encode(settings).decode(), ",".join(writers), log=log
    )


if __name__ == "__main__":
    kinds: dict[str, type[StoreSettings]] = {kind.driver: kind for kind in get_args(StoreSettings)}
    asyncio.run(_main(msgspec.json.decode(sys.argv[2], type=kinds[sys.argv[1]]), sys.argv[3].split(",")))
