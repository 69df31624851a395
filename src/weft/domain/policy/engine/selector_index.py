"""Which of many selectors match a set of labels, without trying them all.

Each selector is filed under something that labels must have for it to match at all: the pairs `key=value` of its first
`In`, or the key of its first `Exists`. Only selectors without such a condition are tried every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

from weft.domain.policy.engine.rule_index import Index
from weft.domain.selectors import Operator, Selector

_Place = tuple[str, ...]
_ALWAYS: _Place = ()


class SelectorIndex:
    """Selectors, findable by the labels they match."""

    def __init__(self) -> None:
        self._filed: Index[_Place, Selector] = Index()

    def add(self, selector: Selector) -> None:
        for place in _places(selector):
            self._filed.add(place, selector)

    def discard(self, selector: Selector) -> None:
        for place in _places(selector):
            self._filed.discard(place, selector)

    def matching(self, labels: Mapping[str, str]) -> Iterator[Selector]:
        """Every selector that matches the labels, each once."""
        for place in (_ALWAYS, *((key,) for key in labels), *labels.items()):
            for selector in self._filed[place]:
                if selector.matches(labels):
                    yield selector

    def copy(self) -> Self:
        twin = type(self)()
        twin._filed = self._filed.copy()
        return twin


def _places(selector: Selector) -> list[_Place]:
    for requirement in selector.requirements:
        if requirement.operator is Operator.IN:
            return [(requirement.key, value) for value in requirement.values]
    for requirement in selector.requirements:
        if requirement.operator is Operator.EXISTS:
            return [(requirement.key,)]
    return [_ALWAYS]
