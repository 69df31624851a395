"""Many actors on one store, and a scheduler that owns every turn and the clock: a seed repeats a run exactly.

Actors are ordinary coroutines. Each of their calls to the store waits for its turn; when no actor can go on, the
scheduler chooses what happens next: a call succeeds, fails, succeeds with its answer lost or long after its caller gave
up, a watch event arrives, or the clock moves to the next timer. No time passes otherwise, and none is slept.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from enum import Enum
from random import Random
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from weft.domain.errors import Compacted, Unavailable, WeftError
from weft.domain.ids import StoreKey
from weft.ports.store import Change, Compare, Entry, LeaseId, Listing, Revision, Store, Write

T = TypeVar("T")

# Delays in seconds of calls whose caller timed out.
DELAYS = (0.0, 1.0, 5.0, 25.0)


class Fault(Enum):
    """The fault injected into a call to the store."""

    DONE = "done"
    REFUSED = "refused"
    ANSWER_LOST = "answer lost"
    LATE = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultProfile:
    """Probabilities of the faults of a run, of the clock moving while actors wait, and of a compacted history."""

    refused: float
    answer_lost: float
    late: float
    clock: float
    compacted: float

    @classmethod
    def random(cls, rng: Random) -> FaultProfile:
        """A random profile with few or many faults: varied runs find more."""
        rate = rng.choice((0.0, 0.01, 0.05, 0.15))
        return cls(
            refused=rate * rng.random(),
            answer_lost=rate * rng.random(),
            late=rate * rng.random(),
            clock=rng.choice((0.02, 0.1, 0.3)),
            compacted=rate * rng.random(),
        )


class _Turn(NamedTuple):
    actor: str
    what: str
    go: asyncio.Future[None]


class Scheduler:
    """Runs coroutines on its own event loop. `check` is called after every step and raises on a violation.

    It begins without faults: every call succeeds, all actors are equally fast, and the clock moves only when idle.
    """

    def __init__(self, rng: Random, profile: FaultProfile) -> None:
        self.rng = rng
        self.profile = profile
        self.now = 0.0
        self.history: list[str] = []
        self.check: Callable[[], None] = lambda: None
        self._waiting: list[_Turn] = []
        self._pace: dict[str, float] = {}
        self._stragglers: set[asyncio.Task[None]] = set()
        self._faults_enabled = False

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run to the end; an error carries the history of the last steps."""
        try:
            with asyncio.Runner(loop_factory=lambda: _Loop(self)) as runner:
                try:
                    return runner.run(main)
                finally:
                    self._faults_enabled = False
                    self.check = lambda: None
        except BaseException as error:
            error.add_note("\n".join(self.history[-200:]))
            raise

    async def turn(self, actor: str, what: str) -> None:
        """Wait until the scheduler resumes this actor."""
        turn = _Turn(actor, what, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        await turn.go

    def chance(self, probability: float) -> bool:
        return self._faults_enabled and self.rng.random() < probability

    def next_fault(self) -> Fault:
        """The fault of the call whose turn it is."""
        for fault, probability in (
            (Fault.REFUSED, self.profile.refused),
            (Fault.ANSWER_LOST, self.profile.answer_lost),
            (Fault.LATE, self.profile.late),
        ):
            if self.chance(probability):
                return fault
        return Fault.DONE

    def apply_late(self, actor: str, what: str, act: Callable[[], Awaitable[object]]) -> None:
        """Apply a call at a later turn, after its caller has timed out."""

        async def apply() -> None:
            await asyncio.sleep(self.rng.choice(DELAYS))
            await self.turn(f"{actor} late", what)
            with suppress(WeftError):
                await act()

        task = asyncio.create_task(apply(), name=f"{actor} late")
        self._stragglers.add(task)
        task.add_done_callback(self._stragglers.discard)

    def enable_faults(self) -> None:
        """From here on the fault profile applies."""
        self._faults_enabled = True

    async def disable_faults(self) -> None:
        """From here on no call fails; returns when all late calls have arrived."""
        self._faults_enabled = False
        while self._stragglers:
            await asyncio.wait(self._stragglers)

    def step(self, until_timer: float | None) -> None:
        """No actor can run: choose the next step."""
        self.check()
        self._waiting = [turn for turn in self._waiting if not turn.go.done()]
        if not self._waiting or (until_timer is not None and self.chance(self.profile.clock)):
            if until_timer is None:
                raise AssertionError("deadlock: no actor and no timer can run")
            self.now += until_timer
            return
        (chosen,) = self.rng.choices(self._waiting, [self._pace_of(turn.actor) for turn in self._waiting])
        self._waiting.remove(chosen)
        self.history.append(f"{self.now:9.3f} {chosen.actor}: {chosen.what}")
        chosen.go.set_result(None)

    def _pace_of(self, actor: str) -> float:
        """Some actors are thirty times slower than others, while faults are enabled."""
        if not self._faults_enabled:
            return 1.0
        if actor not in self._pace:
            self._pace[actor] = 10 ** -self.rng.uniform(0.0, 1.5)
        return self._pace[actor]


class _Loop(asyncio.SelectorEventLoop):
    """An event loop on the scheduler's clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        super().__init__(_Selector(scheduler))

    def time(self) -> float:
        return self._scheduler.now


class _Selector(selectors.SelectSelector):
    """Calls the scheduler where an event loop would sleep until the next timer."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._scheduler.step(timeout)
        return super().select(0)


class ScheduledStore:
    """The store as one actor sees it: every call waits for its turn and may fail; all fail while `partitioned`."""

    def __init__(self, store: Store, scheduler: Scheduler, actor: str) -> None:
        self._store = store
        self._scheduler = scheduler
        self._actor = actor
        self.partitioned = False

    async def read(self, key: StoreKey) -> Entry | None:
        return await self._call(f"read {key}", lambda: self._store.read(key))

    async def list(self, prefix: StoreKey) -> Listing:
        return await self._call(f"list {prefix or 'all'}", lambda: self._store.list(prefix))

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        what = f"commit {', '.join(_describe(write) for write in writes)}"
        return await self._call(what, lambda: self._store.commit(compares, writes))

    async def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]:
        async with aclosing(self._store.watch(prefix, since)) as changes:
            async for change in changes:
                await self._scheduler.turn(f"{self._actor} watch", f"change of revision {change.revision}")
                if self._scheduler.chance(self._scheduler.profile.compacted):
                    raise Compacted("the scheduler has compacted the history")
                if self.partitioned or self._scheduler.next_fault() is not Fault.DONE:
                    raise Unavailable("the watch was cut")
                yield change

    async def grant(self, ttl: float) -> LeaseId:
        return await self._call("grant", lambda: self._store.grant(ttl))

    async def keep_alive(self, lease: LeaseId) -> None:
        await self._call(f"keep lease {lease} alive", lambda: self._store.keep_alive(lease))

    async def revoke(self, lease: LeaseId) -> None:
        await self._call(f"revoke lease {lease}", lambda: self._store.revoke(lease))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The store belongs to the test, not to the actor."""

    async def _call(self, what: str, act: Callable[[], Awaitable[T]]) -> T:
        try:
            await self._scheduler.turn(self._actor, what)
        except asyncio.CancelledError:
            if not self.partitioned and self._scheduler.chance(0.5):
                self._scheduler.apply_late(self._actor, what, act)  # it was in flight when its caller timed out
            raise
        fault = self._next_fault()
        self._note(fault.value)
        if fault is Fault.LATE:
            self._scheduler.apply_late(self._actor, what, act)
        if fault in {Fault.LATE, Fault.REFUSED}:
            raise Unavailable(f"{what}: no answer")
        try:
            answer = await act()
        except WeftError as error:
            self._note(type(error).__name__)
            if fault is Fault.ANSWER_LOST:
                raise Unavailable(f"{what}: no answer") from error
            raise
        if fault is Fault.ANSWER_LOST:
            raise Unavailable(f"{what}: no answer")
        return answer

    def _next_fault(self) -> Fault:
        if not self.partitioned:
            return self._scheduler.next_fault()
        return (
            Fault.LATE if self._scheduler.chance(0.3) else Fault.REFUSED
        )  # requests sent before the partition still arrive

    def _note(self, outcome: str) -> None:
        if outcome != Fault.DONE.value:
            self._scheduler.history.append(f"{self._scheduler.now:9.3f} {self._actor}: … {outcome}")


def _describe(write: Write) -> str:
    return f"{type(write).__name__} {getattr(write, 'key', None) or getattr(write, 'prefix', '')}"


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, for synchronous code."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise AssertionError("the coroutine had to wait")
