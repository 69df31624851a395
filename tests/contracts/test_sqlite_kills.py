"""The embedded store is killed during operations: no acknowledged commit is lost, none is partial."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path

import pytest
from tests.support.store_load import Commit, CommitLog, stress_process

from weft.adapters.stores.sqlite import open_store
from weft.drivers import SqliteStoreSettings
from weft.lab.waiting import soon
from weft.ports.store import Revision
from weft.runtime.store.mirror import EVERYTHING

HISTORY = 1_000_000
WRITERS = ("a", "b", "c", "d")
FIRST_REVISION = 1

pytestmark = pytest.mark.timeout(300)  # starts many processes, on a machine that may be busy


async def killed_run(settings: SqliteStoreSettings, chance: random.Random, log: Path) -> list[Commit]:
    """Start writers, kill them at a random moment, and return the acknowledged commits."""
    last_words, longest = chance.choice([("opening", 0.02), ("open", 0.01), ("commit", 0.03), ("commit", 0.1)])
    lines = []
    with stress_process(settings, WRITERS, log=log) as child:
        while True:
            lines.append(await child.next_line())
            if lines[-1] == last_words or (last_words == "commit" and len(lines) > 2):
                break
        await asyncio.sleep(chance.uniform(0, longest))  # a random moment is the point of the test
        child.kill()
        lines += child.read_rest()
    return [Commit.parse(line) for line in lines if line not in {"opening", "open"}]


async def check(path: Path, commit_log: CommitLog, acknowledged: list[Commit]) -> Revision:
    """Open the file of the killed process, and compare history and state with the acknowledged commits."""
    async with open_store(path, history=HISTORY) as store:
        listing = await store.list(EVERYTHING)
        async with aclosing(store.watch(EVERYTHING, max(commit_log.revision, FIRST_REVISION))) as changes:
            while commit_log.revision < listing.revision != FIRST_REVISION:
                commit_log.take(await soon(anext(changes)))
    for commit in acknowledged:
        commit_log.check(commit)
    commit_log.check_present({entry.key: entry.value for entry in listing.entries})
    return listing.revision


@pytest.mark.parametrize("kills", [50, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
async def test_no_commit_is_lost_or_partial_when_the_process_is_killed(tmp_path: Path, kills: int) -> None:
    settings = SqliteStoreSettings(path=str(tmp_path / "store.db"), history=HISTORY)
    commit_log, chance, revision = CommitLog(), random.Random(), 0
    for _ in range(kills):
        acknowledged = await killed_run(settings, chance, tmp_path / "log")
        before, revision = revision, await check(Path(settings.path), commit_log, acknowledged)
        assert revision >= before
    assert commit_log.commits > kills


async def test_a_process_killed_during_file_creation_leaves_a_usable_file(tmp_path: Path) -> None:
    for n in range(10):
        settings = SqliteStoreSettings(path=str(tmp_path / f"{n}.db"), history=HISTORY)
        with stress_process(settings, WRITERS, log=tmp_path / "log") as child:
            assert await child.next_line() == "opening"
            await asyncio.sleep(random.uniform(0, 0.02))  # a random moment of the operation is the purpose
            child.kill()
            acknowledged = [Commit.parse(line) for line in child.read_rest() if line != "open"]
        await check(Path(settings.path), CommitLog(), acknowledged)
