"""The rules of one class in one direction, found by whom they speak about."""

from __future__ import annotations

from collections.abc import Iterator

from weft.domain.policy.engine.rule_index import Index
from weft.domain.policy.model.rules import FlowRule
from weft.domain.policy.policymap.identity_classes import IdentityClass, Term, remote_terms, speaks_of_all


class RulesByPeer:
    """Rules that protect a class. Adding twice and discarding what is absent change nothing."""

    def __init__(self) -> None:
        self._for_all: set[FlowRule] = set()
        self._by_term: Index[Term, FlowRule] = Index()

    def __bool__(self) -> bool:
        return bool(self._for_all) or any(True for _ in self._by_term)

    def add(self, rule: FlowRule) -> None:
        if speaks_of_all(rule):
            self._for_all.add(rule)
        for term in remote_terms(rule):
            self._by_term.add(term, rule)

    def discard(self, rule: FlowRule) -> None:
        self._for_all.discard(rule)
        for term in remote_terms(rule):
            self._by_term.discard(term, rule)

    def terms(self) -> Iterator[Term]:
        """By what to find the classes that some rule tells from everyone else."""
        return iter(self._by_term)

    def has(self, term: Term) -> bool:
        return bool(self._by_term[term])

    def rules_for_all(self) -> frozenset[FlowRule]:
        """The rules about everyone."""
        return frozenset(self._for_all)

    def rules_for(self, remote: IdentityClass) -> frozenset[FlowRule]:
        """The rules about a class; nothing where it is as everyone."""
        particular = {
            rule
            for term in remote.terms()
            for rule in self._by_term[term]
            if rule.peers is None or any(map(remote.is_peer, rule.peers))
        }
        return frozenset(self._for_all | particular) if particular else frozenset()
