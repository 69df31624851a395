"""What a change of the state newly allows or blocks, in terms of groups and pods.

Workloads that are not in both states are left out: their coming and going is no change of policy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.explain.compare import Comparison, End, Outcome
from weft.domain.policy.model.identities import IdentityKey
from weft.domain.policy.model.ranges import address_set, range_text
from weft.domain.policy.model.rules import RuleId


class FlowChange(msgspec.Struct, frozen=True, kw_only=True, order=True, rename="camel"):
    """Flows from any of the sources to any of the targets, on these services, that become allowed or blocked.

    An end is `group TENANT:GROUP` or `namespace NAME` where all its workloads are meant, else a workload's key, or
    `world ADDRESSES`. `decidedBy` is the rule that decides after the change.
    """

    allowed: bool
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    services: tuple[str, ...]
    versions: tuple[int, ...]
    decided_by: RuleId


def diff(before: Engine, after: Engine) -> tuple[FlowChange, ...]:
    """Every flow whose verdict differs between the two states; newly blocked ones first."""
    comparison = Comparison(before, after)
    targets_of: dict[tuple[Outcome, End], list[End]] = defaultdict(list)
    for source, target, outcome in comparison.changes():
        targets_of[outcome, source].append(target)
    sources_of: dict[tuple[Outcome, frozenset[End]], list[End]] = defaultdict(list)
    for (outcome, source), targets in targets_of.items():
        sources_of[outcome, frozenset(targets)].append(source)
    collectives = _collectives(after, comparison.workloads)
    changes: dict[FlowChange, set[int]] = defaultdict(set)
    for (outcome, reached), sources in sources_of.items():
        change = FlowChange(
            allowed=outcome.allowed,
            sources=_names(sources, collectives),
            targets=_names(reached, collectives),
            services=outcome.services,
            versions=(),
            decided_by=outcome.decided_by,
        )
        changes[change].add(outcome.version)
    return tuple(
        sorted(
            msgspec.structs.replace(change, versions=tuple(sorted(versions))) for change, versions in changes.items()
        )
    )


_Collectives = dict[str, set[IdentityKey]]


def _collectives(engine: Engine, workloads: Iterable[IdentityKey]) -> _Collectives:
    """The names under which people know workloads: their group, else their namespace."""
    collectives: _Collectives = defaultdict(set)
    for key in workloads:
        workload = engine.workloads[key]
        if workload.group:
            collectives[f"group {workload.group_key}"].add(key)
        elif workload.namespace:
            collectives[f"namespace {workload.namespace}"].add(key)
    return collectives


def _names(ends: Iterable[End], collectives: _Collectives) -> tuple[str, ...]:
    """The ends in words: groups and namespaces where they are complete, else workloads, then the world."""
    ends = tuple(ends)
    meant = {key for end in ends for key in end.members}
    complete = [name for name, members in collectives.items() if members <= meant]
    rest = meant.difference(*(collectives[name] for name in complete))
    world = address_set(end.addresses for end in ends if end.addresses is not None)
    return (*complete, *sorted(rest), *(f"world {range_text(addresses)}" for addresses in world.ranges))
