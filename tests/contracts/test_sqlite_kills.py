"""The embedded store is killed inside operations: nothing acknowledged is lost, nothing is half done."""

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

pytestmark = pytest.mark.timeout(300)  # many processes are started, on a machine that may be busy


async def killed_run(settings: SqliteStoreSettings, chance: random.Random, log: Path) -> list[Commit]:
    """Start writers, kill them at a random moment of their life, and tell what was acknowledged to them."""
    last_words, longest = chance.choice([("opening", 0.02), ("open", 0.01), ("commit", 0.03), ("commit", 0.1)])
    said = []
    with stress_process(settings, WRITERS, log=log) as child:
        while True:
            said.append(await child.next_line())
            if said[-1] == last_words or (last_words == "commit" and len(said) > 2):
                break
        await asyncio.sleep(chance.uniform(0, longest))
        child.kill()
        said += child.read_rest()
    return [Commit.parse(line) for line in said if line not in {"opening", "open"}]


async def check(path: Path, ledger: CommitLog, acknowledged: list[Commit]) -> Revision:
    """Open what the dead left, and compare history and state with what was acknowledged."""
    async with open_store(path, history=HISTORY) as store:
        listing = await store.list(EVERYTHING)
        async with aclosing(store.watch(EVERYTHING, max(ledger.revision, FIRST_REVISION))) as changes:
            while ledger.revision < listing.revision != FIRST_REVISION:
                ledger.take(await soon(anext(changes)))
    for commit in acknowledged:
        ledger.check(commit)
    ledger.check_present({entry.key: entry.value for entry in listing.entries})
    return listing.revision


@pytest.mark.parametrize("kills", [50, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
async def test_nothing_is_lost_or_half_done_when_the_process_is_killed(tmp_path: Path, kills: int) -> None:
    settings = SqliteStoreSettings(path=str(tmp_path / "store.db"), history=HISTORY)
    ledger, chance, revision = CommitLog(), random.Random(), 0
    for _ in range(kills):
        acknowledged = await killed_run(settings, chance, tmp_path / "log")
        before, revision = revision, await check(Path(settings.path), ledger, acknowledged)
        assert revision >= before
    assert ledger.commits > kills


async def test_a_process_killed_while_it_creates_the_file_leaves_one_that_can_be_used(tmp_path: Path) -> None:
    for n in range(10):
        settings = SqliteStoreSettings(path=str(tmp_path / f"{n}.db"), history=HISTORY)
        with stress_process(settings, WRITERS, log=tmp_path / "log") as child:
            assert await child.next_line() == "opening"
            await asyncio.sleep(random.uniform(0, 0.02))
            child.kill()
            acknowledged = [Commit.parse(line) for line in child.read_rest() if line != "open"]
        await check(Path(settings.path), CommitLog(), acknowledged)
