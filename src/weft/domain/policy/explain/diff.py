"""Policy diff: what a change newly allows or blocks, by group, namespace and workload.

Workloads that are not in both states are left out: adding or deleting a workload is not a change of policy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.explain.compare import Comparison, PeerClass, VerdictChange
from weft.domain.policy.model.identities import IdentityKey
from weft.domain.policy.model.ranges import address_set, range_text
from weft.domain.policy.model.rules import RuleId


class FlowChange(msgspec.Struct, frozen=True, kw_only=True, order=True, rename="camel"):
    """Flows from any source to any target, on these services, that become allowed or blocked.

    An end is `group TENANT:GROUP` or `namespace NAME` if it includes all their workloads, else a workload's key, or
    `world ADDRESSES`. `decidedBy` is the deciding rule after the change.
    """

    allowed: bool
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    services: tuple[str, ...]
    versions: tuple[int, ...]
    decided_by: RuleId


def diff(before: Engine, after: Engine) -> tuple[FlowChange, ...]:
    """Return every flow whose verdict differs between the two states; newly blocked ones first."""
    comparison = Comparison(before, after)
    # Pairs are merged twice, by source and then by set of destinations, into as few lines as a person can read.
    targets_of: dict[tuple[VerdictChange, PeerClass], list[PeerClass]] = defaultdict(list)
    for source, target, verdict_change in comparison.changes():
        targets_of[verdict_change, source].append(target)
    sources_of: dict[tuple[VerdictChange, frozenset[PeerClass]], list[PeerClass]] = defaultdict(list)
    for (verdict_change, source), targets in targets_of.items():
        sources_of[verdict_change, frozenset(targets)].append(source)
    named_groups = _named_groups(after, comparison.workloads)
    changes: dict[FlowChange, set[int]] = defaultdict(set)
    for (verdict_change, reached), sources in sources_of.items():
        change = FlowChange(
            allowed=verdict_change.allowed,
            sources=_names(sources, named_groups),
            targets=_names(reached, named_groups),
            services=verdict_change.services,
            versions=(),
            decided_by=verdict_change.decided_by,
        )
        # Equal changes of both IP versions become one.
        changes[change].add(verdict_change.version)
    return tuple(
        sorted(
            msgspec.structs.replace(change, versions=tuple(sorted(versions))) for change, versions in changes.items()
        )
    )


_NamedGroups = dict[str, set[IdentityKey]]


def _named_groups(engine: Engine, workloads: Iterable[IdentityKey]) -> _NamedGroups:
    """Return the workloads by the name that operators use: their group, else their namespace."""
    named_groups: _NamedGroups = defaultdict(set)
    for key in workloads:
        # A pod with a Contiv group is named by the group only, so that no workload is listed twice.
        workload = engine.workloads[key]
        if workload.group:
            named_groups[f"group {workload.group_key}"].add(key)
        elif workload.namespace:
            named_groups[f"namespace {workload.namespace}"].add(key)
    return named_groups


def _names(ends: Iterable[PeerClass], named_groups: _NamedGroups) -> tuple[str, ...]:
    """Format the ends: groups and namespaces that are complete, then other workloads, then world addresses."""
    ends = tuple(ends)
    members = {key for end in ends for key in end.members}
    complete = [name for name, group in named_groups.items() if group <= members]
    # Workloads of a complete group are not listed again.
    rest = members.difference(*(named_groups[name] for name in complete))
    world = address_set(end.addresses for end in ends if end.addresses is not None)
    return (*complete, *sorted(rest), *(f"world {range_text(addresses)}" for addresses in world.ranges))
