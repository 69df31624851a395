"""Label selectors: parse, match, print.

A `Selector` is the canonical form of every spelling: Kubernetes' `matchLabels` and `matchExpressions`, the text
`app=web,tier in (a,b),!old`, and Contiv's list of `key=value`. Requirements are ANDed, sorted and unique, so that two
spellings of one meaning are equal, and parsing the printed form yields the same selector. The empty selector matches
everything; a missing selector is `None`, and its meaning is up to the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from weft.domain.errors import Invalid

# A label's key and value.
Label = tuple[str, str]

# Kubernetes' syntax of label keys and values (at most 63 characters) and of key prefixes (at most 253).
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_DNS = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_KEY = re.compile(rf"(?:(?P<prefix>{_DNS}(?:\.{_DNS})*)/)?{_NAME}")
_VALUE = re.compile(rf"(?:{_NAME})?")
_MAX_PREFIX = 253

# Alternatives in this order: a plain key would also match the start of a pair.
_TERM = re.compile(
    r"""\s*(?:
        !\s*(?P<missing>[^\s,()=!]+)
      | (?P<set_key>[^\s,()=!]+)\s+(?P<set_operator>in|notin)\s*\((?P<values>[^()]*)\)
      | (?P<pair_key>[^\s,()=!]+)\s*(?P<pair_operator>==|=|!=)\s*(?P<value>[^\s,()=!]*)
      | (?P<present>[^\s,()=!]+)
    )\s*""",
    re.VERBOSE,
)


class Operator(StrEnum):
    """The operator of a requirement, as in Kubernetes."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


# Ordered and hashable: selectors are canonical sets of requirements. gc=False: they hold no cycles.
class Requirement(msgspec.Struct, frozen=True, order=True, cache_hash=True, gc=False):
    """One condition on one label. As in Kubernetes, `NotIn` also matches if the label is absent."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels satisfy this requirement."""
        value = labels.get(self.key)
        if self.operator is Operator.IN:
            return value is not None and value in self.values
        if self.operator is Operator.NOT_IN:
            return value is None or value not in self.values
        return (value is not None) is (self.operator is Operator.EXISTS)

    def __str__(self) -> str:
        match self.operator:
            case Operator.EXISTS:
                return self.key
            case Operator.DOES_NOT_EXIST:
                return f"!{self.key}"
            case Operator.IN if len(self.values) == 1:
                return f"{self.key}={self.values[0]}"
            case Operator.NOT_IN if len(self.values) == 1:
                return f"{self.key}!={self.values[0]}"
        word = "in" if self.operator is Operator.IN else "notin"
        return f"{self.key} {word} ({','.join(self.values)})"


class Selector(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """A conjunction of requirements in canonical order. Build it with `select` or a parser."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels satisfy all requirements."""
        return all(requirement.matches(labels) for requirement in self.requirements)

    def __str__(self) -> str:
        return ",".join(map(str, self.requirements))


# Shared, because most Kubernetes policies use it.
EVERYTHING = Selector()


def select(requirements: Iterable[Requirement]) -> Selector:
    """The canonical selector of these requirements."""
    return Selector(
        tuple(
            sorted(
                {
                    Requirement(requirement.key, requirement.operator, tuple(sorted(set(requirement.values))))
                    for requirement in requirements
                }
            )
        )
    )


class LabelExpression(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """One entry of `matchExpressions`, not yet validated."""

    key: str
    operator: str
    values: tuple[str, ...] | None = None


class LabelSelector(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, rename="camel"
):
    """Kubernetes' LabelSelector, not yet validated. An empty one selects everything; an absent one is not empty."""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[LabelExpression, ...] | None = None


def parse_label_selector(source: LabelSelector, *, field: str) -> Selector:
    """Parse a LabelSelector; `Invalid` names the wrong member below `field`."""
    requirements: list[Requirement] = []
    for key, value in (source.match_labels or {}).items():
        _check_key(key, field=f"{field}.matchLabels")
        _check_value(value, field=f"{field}.matchLabels.{key}")
        requirements.append(Requirement(key, Operator.IN, (value,)))
    for index, expression in enumerate(source.match_expressions or ()):
        requirements.append(_parse_expression(expression, field=f"{field}.matchExpressions[{index}]"))
    return select(requirements)


def _parse_expression(expression: LabelExpression, *, field: str) -> Requirement:
    _check_key(expression.key, field=f"{field}.key")
    try:
        operator = Operator(expression.operator)
    except ValueError as error:
        raise Invalid(
            f"operator {expression.operator!r} is unknown: use {', '.join(Operator)}", field=f"{field}.operator"
        ) from error
    values = expression.values or ()
    if operator in (Operator.IN, Operator.NOT_IN):
        if not values:
            raise Invalid(f"{operator} needs at least one value", field=f"{field}.values")
        for value in values:
            _check_value(value, field=f"{field}.values")
    elif values:
        raise Invalid(f"{operator} takes no values", field=f"{field}.values")
    return Requirement(expression.key, operator, values)


def parse_selector(text: str, *, field: str = "selector") -> Selector:
    """Parse terms `k=v`, `k!=v`, `k in (a,b)`, `k notin (a,b)`, `k`, `!k`, joined by commas, as kubectl does."""
    text = text.strip()
    requirements: list[Requirement] = []
    position = 0
    # An empty text is the empty selector, but a trailing comma is an error.
    while position < len(text) or requirements:
        term = _TERM.match(text, position)
        if term is None:
            raise Invalid(f"{text!r} is not a label selector at {text[position : position + 20]!r}", field=field)
        requirements.append(_requirement_of_term(term, field=field))
        position = term.end()
        if position == len(text):
            break
        if text[position] != ",":
            raise Invalid(f"{text!r} lacks a comma before {text[position : position + 20]!r}", field=field)
        position += 1
    return select(requirements)


def _requirement_of_term(term: re.Match[str], *, field: str) -> Requirement:
    if key := term["missing"]:
        requirement = Requirement(key, Operator.DOES_NOT_EXIST)
    elif key := term["set_key"]:
        operator = Operator.IN if term["set_operator"] == "in" else Operator.NOT_IN
        requirement = Requirement(key, operator, tuple(value.strip() for value in term["values"].split(",")))
    elif key := term["pair_key"]:
        operator = Operator.NOT_IN if term["pair_operator"] == "!=" else Operator.IN
        requirement = Requirement(key, operator, (term["value"],))
    else:
        requirement = Requirement(term["present"], Operator.EXISTS)
    _check_key(requirement.key, field=field)
    for value in requirement.values:
        _check_value(value, field=field)
    return requirement


def parse_pairs(pairs: Sequence[str], *, field: str = "selectors") -> Selector:
    """Parse Contiv's list of `key=value`: labels match if they contain every pair (W22)."""
    return select(Requirement(key, Operator.IN, (value,)) for key, value in parse_labels(pairs, field=field))


def parse_labels(pairs: Sequence[str], *, field: str = "selectors") -> frozenset[Label]:
    """The labels of a list of `key=value`."""
    labels: list[Label] = []
    for pair in pairs:
        key, _, value = pair.partition("=")
        # A pair without "=" would become a label with an empty value.
        if not key or "=" in value or len(key) == len(pair):
            raise Invalid(f"selector {pair!r} is not of the form key=value", field=field)
        labels.append((key, value))
    return frozenset(labels)


def _check_key(key: str, *, field: str) -> None:
    match = _KEY.fullmatch(key)
    # The regular expression limits the name to 63 characters, not the prefix.
    if match is None or len(match["prefix"] or "") > _MAX_PREFIX:
        raise Invalid(f"label key {key!r} is not of the form [dns-name/]name, name at most 63 characters", field=field)


def _check_value(value: str, *, field: str) -> None:
    if not _VALUE.fullmatch(value):
        raise Invalid(
            f"label value {value!r} is not empty or up to 63 letters, digits, '-', '_', '.', alphanumeric at both ends",
            field=field,
        )
