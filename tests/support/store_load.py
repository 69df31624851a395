"""Writers that number their commits, and a log that detects lost, doubled and partial commits.

As a program (`python -m tests.support.store_load DRIVER SETTINGS WRITERS`) it opens a store and writes until killed,
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
    """The two keys of each commit of a writer."""
    return StoreKey(f"{writer}/one"), StoreKey(f"{writer}/two")


async def write_on(store: Store, writer: str, acknowledge: Acknowledge) -> None:
    """Commit consecutive numbers until cancelled. `writer` is a key prefix that no other writer may use.

    Each commit puts its number to two keys and compares the previous one. If the result of a commit is unknown,
    the store is read before the next, so that none is applied twice.
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
            known = False  # Stale: a commit with unknown result was applied late
            continue
        number += 1
        acknowledge(Commit(writer, number, revision))


class CommitLog:
    """The commits that a watch has delivered, checked on arrival."""

    def __init__(self) -> None:
        self.revision: Revision = NEVER
        self._last: dict[str, int] = {}
        self._found: dict[tuple[str, int], Revision] = {}

    def take(self, change: Change) -> None:
        """Record the next change. Fails if a commit is missing, doubled or partial."""
        assert change.revision > self.revision, f"revision {change.revision} came after {self.revision}"
        self.revision = change.revision
        puts = {event.key: event.value for event in change.events}
        assert len(puts) == len(change.events), f"revision {change.revision} has a key twice"
        for writer in {key.rpartition("/")[0] for key in puts}:
            one, two = (puts.pop(key, None) for key in _halves(writer))
            assert one is not None, f"revision {change.revision} has a partial commit of {writer}"
            assert one == two, f"revision {change.revision} has {one!r} and {two!r} of {writer}"
            number = int(one)
            assert number == self._last.get(writer, 0) + 1, (
                f"{writer} went from {self._last.get(writer, 0)} to {number}"
            )
            self._last[writer] = number
            self._found[writer, number] = change.revision
        assert not puts, f"revision {change.revision} has keys of no writer: {sorted(puts)}"

    async def wait_for(self, revision: Revision) -> None:
        """Return when the watch has delivered this revision."""
        await until(lambda: self.revision >= revision)

    def check(self, acknowledged: Commit) -> None:
        """Fails if an acknowledged commit was not delivered at its revision."""
        found = self._found.get((acknowledged.writer, acknowledged.number))
        assert found == acknowledged.revision, f"acknowledged {acknowledged}, found at revision {found}"

    def check_present(self, values: dict[StoreKey, bytes]) -> None:
        """Fails if the current state of the store is not the sum of its changes."""
        expected = {key: b"%d" % number for writer, number in self._last.items() for key in _halves(writer)}
        assert values == expected

    @property
    def commits(self) -> int:
        """The number of commits."""
        return len(self._found)


async def _main(settings: StoreSettings, writers: list[str]) -> None:
    def write_line(line: object) -> None:
        os.write(
            1, f"{line}\n".encode()
        )  # unbuffered: an acknowledged commit must be known before the process is killed

    write_line("opening")
    async with open_store(settings) as store, asyncio.TaskGroup() as tasks:
        write_line("open")
        for writer in writers:
            tasks.create_task(write_on(store, writer, write_line))


def stress_process(settings: StoreSettings, writers: Sequence[str], *, log: Path) -> Child:
    """Start this program."""
    return Child.python(
        "tests.support.store_load", settings.driver, msgspec.json.encode(settings).decode(), ",".join(writers), log=log
    )


if __name__ == "__main__":
    kinds: dict[str, type[StoreSettings]] = {kind.driver: kind for kind in get_args(StoreSettings)}
    asyncio.run(_main(msgspec.json.decode(sys.argv[2], type=kinds[sys.argv[1]]), sys.argv[3].split(",")))
