"""The selector indexes, compared with a plain scan."""

from __future__ import annotations

from random import Random

import pytest

from weft.domain.policy.engine.membership import NamespaceSelectorIndex, SelectorIndex
from weft.domain.policy.model.multimap import Multimap
from weft.domain.policy.model.rules import PodsOfNamespaces
from weft.domain.selectors import EVERYTHING, Operator, Requirement, Selector, select

KEYS, VALUES = ["a", "b", "c"], ["1", "2", "3"]


def random_selector(rng: Random) -> Selector:
    requirements = []
    for _ in range(rng.randint(0, 3)):
        operator = rng.choice(list(Operator))
        values = tuple(rng.sample(VALUES, rng.randint(1, 2))) if operator in (Operator.IN, Operator.NOT_IN) else ()
        requirements.append(Requirement(rng.choice(KEYS), operator, values))
    return select(requirements)


def random_labels(rng: Random) -> dict[str, str]:
    return {key: rng.choice(VALUES) for key in KEYS if rng.random() < 0.6}


@pytest.mark.parametrize("seed", range(30))
def test_the_selector_index_finds_what_a_scan_finds(seed: int) -> None:
    rng = Random(seed)
    index, known = SelectorIndex(), set[Selector]()
    for _ in range(60):
        selector = random_selector(rng)
        if selector in known and rng.random() < 0.7:
            index.discard(selector)
            known.discard(selector)
        else:
            index.add(selector)
            known.add(selector)
        labels = random_labels(rng)
        found = list(index.matching(labels))
        assert len(found) == len(set(found))
        assert set(found) == {each for each in known if each.matches(labels)}


@pytest.mark.parametrize("seed", range(30))
def test_the_namespace_selector_index_finds_what_a_scan_finds(seed: int) -> None:
    rng = Random(seed)
    index, known, namespaces = NamespaceSelectorIndex(), set[PodsOfNamespaces](), dict[str, dict[str, str]]()
    for _ in range(80):
        name, labels = rng.choice("uvw"), random_labels(rng)
        match rng.choice(["put", "remove", "add", "add", "discard"]):
            case "put":
                namespaces[name] = labels
                index.put_namespace(name, labels)
            case "remove":
                namespaces.pop(name, None)
                index.remove_namespace(name)
            case "add":
                new = PodsOfNamespaces(random_selector(rng), random_selector(rng))
                known.add(new)
                index.add(new)
            case "discard" if known:
                old = rng.choice(sorted(known, key=str))
                known.discard(old)
                index.discard(old)
        for each in "uvw":
            ns_labels = namespaces.get(each)
            assert set(index.sets_for(each, labels)) == {
                one
                for one in known
                if ns_labels is not None and one.namespaces.matches(ns_labels) and one.pods.matches(labels)
            }
        for one in known:
            assert index.namespaces_of(one) == {
                each for each, ns_labels in namespaces.items() if one.namespaces.matches(ns_labels)
            }


def test_an_empty_selector_is_always_found() -> None:
    index = SelectorIndex()
    index.add(EVERYTHING)
    assert list(index.matching({})) == [EVERYTHING]
    index.discard(EVERYTHING)
    index.discard(EVERYTHING)
    assert not list(index.matching({}))


def test_a_multimap_drops_keys_without_values() -> None:
    values: Multimap[str, int] = Multimap()
    values.add("a", 1)
    values.add("a", 1)
    twin = values.copy()
    values.discard("a", 1)
    values.discard("a", 1)
    values.discard("b", 1)
    assert list(values) == []
    assert values["a"] == frozenset()
    assert twin["a"] == {1}
