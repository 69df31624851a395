"""The numbers of outcomes, and which groups of rows have each of them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

from weft.domain.ids import TenantName
from weft.domain.policy.engine.rule_index import Index
from weft.domain.policy.model.rules import Action
from weft.domain.policy.policymap.delta_tracker import DeltaTracker
from weft.domain.policy.policymap.l4_partition import Outcome, Service
from weft.domain.policy.policymap.policy_state import VERDICT_DENY, VerdictCounter
from weft.domain.policy.policymap.stable_ids import StableIds

G = TypeVar("G", bound=Hashable)

# How many outcomes that are in no row any more are still known: their drops may be told later.
_REMEMBERED = 1024


class Outcomes(Generic[G]):
    """Every outcome in use has a number and a tally."""

    def __init__(self, ledger: DeltaTracker, *, tenant: TenantName) -> None:
        self._ledger, self._tenant = ledger, tenant
        self._numbers: StableIds[Outcome] = StableIds()
        self._groups: Index[Outcome, G] = Index()
        self._tallies: dict[Outcome, VerdictCounter] = {}
        self._touched: set[Outcome] = set()
        self._named: dict[int, Outcome] = {}
        self._past: dict[int, Outcome] = {}

    def __getitem__(self, outcome: Outcome) -> int:
        return self._numbers[outcome] | (VERDICT_DENY if outcome.action is Action.DENY else 0)

    @property
    def by_number(self) -> Mapping[int, Outcome]:
        """What each number means, or last meant."""
        return ChainMap(self._named, self._past)

    def replace(
        self, group: G, before: Iterable[tuple[Service, Outcome]], after: Iterable[tuple[Service, Outcome]]
    ) -> None:
        """Say which outcomes a group of rows had and has."""
        old, new = {outcome for _, outcome in before}, {outcome for _, outcome in after}
        for outcome in old - new:
            self._groups.discard(outcome, group)
        for outcome in new - old:
            self._groups.add(outcome, group)
        self._touched |= old ^ new

    def settle(self) -> set[G]:
        """Number what came into use and forget what is in none; gives the groups with outcomes of another number."""
        for outcome in self._touched:
            if outcome in self._numbers and not self._groups[outcome]:
                self._numbers.remove(outcome)
        for outcome in self._touched:
            if outcome not in self._numbers and self._groups[outcome]:
                self._numbers.add(outcome, msgspec.json.encode(outcome).decode())
        moved = set(self._numbers.moved)
        self._numbers.moved.clear()
        self._write_tallies(self._touched | moved)
        self._touched.clear()
        return {group for outcome in moved for group in self._groups[outcome]}

    def _write_tallies(self, outcomes: set[Outcome]) -> None:
        for outcome in outcomes:
            if old := self._tallies.pop(outcome, None):
                self._ledger.drop(old)
                del self._named[old.outcome]
                self._past[old.outcome] = outcome
        for outcome in outcomes:
            if outcome in self._numbers:
                number = self[outcome]
                self._tallies[outcome] = VerdictCounter(self._tenant, number)
                self._ledger.put(self._tallies[outcome])
                self._named[number] = outcome
                self._past.pop(number, None)
        for number in list(self._past)[:-_REMEMBERED]:
            del self._past[number]
