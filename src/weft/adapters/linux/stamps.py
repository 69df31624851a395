"""The stamp on connections that were let pass, and the two rules that know it.

Every change of policy comes with a new stamp, in the same transaction: whatever was stamped before is judged anew. The
stamp is a constant of rules and not an element of a set, as a packet meets the rules of one moment from beginning to
end, while sets change under it: what was judged by old sets never gets a new stamp.
"""

from __future__ import annotations

from weft.adapters.linux import wire
from weft.adapters.linux.elements import ACCEPT, INET, SUBSYSTEM, mark, table_header, verdict_data
from weft.adapters.linux.ruleset import KNOWN, STAMP, TABLE
from weft.adapters.linux.wire import APPEND, CREATE, Request

_NEW_RULE, _DELETE_RULE = (SUBSYSTEM << 8 | number for number in (6, 8))
_CHAIN, _EXPRESSIONS = 2, 4
_ITEM = 1
_NAME, _DATA = 1, 2
_VERDICT_REGISTER, _REGISTER = 0, 1
_VALUE = 1
_MARK_KEY = 3
_IS_EQUAL = 0

_IS_STAMP = 0x40000000
"""Set in every stamp and in no other mark of a connection."""


def stamp_of(generation: int) -> int:
    """A stamp that was never used before in a namespace whose nftables have reached this generation."""
    return _IS_STAMP | generation & (_IS_STAMP - 1)


def stamp_commands(stamp: int) -> str:
    """The rules in nft's own language, in place of others."""
    return (
        f"flush chain inet {TABLE} {KNOWN}\n"
        f"add rule inet {TABLE} {KNOWN} ct mark {stamp:#x} accept\n"
        f"flush chain inet {TABLE} {STAMP}\n"
        f"add rule inet {TABLE} {STAMP} ct mark set {stamp:#x} accept\n"
    )


def stamp_requests(stamp: int) -> list[Request]:
    """The same for `apply_changes`."""
    return [
        request
        for chain, rule in _RULES.items()
        for request in (
            Request(_DELETE_RULE, 0, _place(chain), "empty chain", chain),
            Request(_NEW_RULE, CREATE | APPEND, rule.replace(_BLANK, mark(stamp)), "add rule to chain", chain),
        )
    ]


def _place(chain: str) -> bytes:
    return table_header(INET, TABLE) + wire.text(_CHAIN, chain)


def _rule(chain: str, *expressions: bytes) -> bytes:
    return _place(chain) + wire.nest(_EXPRESSIONS, *expressions)


def _expression(name: str, *data: bytes) -> bytes:
    return wire.nest(_ITEM, wire.text(_NAME, name), wire.nest(_DATA, *data))


_BLANK = mark(_IS_STAMP - 1)
_VALUE_OF_STAMP = wire.attribute(_VALUE, _BLANK)
_ACCEPT = _expression("immediate", wire.be32(1, _VERDICT_REGISTER), wire.nest(2, verdict_data(ACCEPT)))
_RULES = {
    KNOWN: _rule(
        KNOWN,
        _expression("ct", wire.be32(1, _REGISTER), wire.be32(2, _MARK_KEY)),
        _expression("cmp", wire.be32(1, _REGISTER), wire.be32(2, _IS_EQUAL), wire.nest(3, _VALUE_OF_STAMP)),
        _ACCEPT,
    ),
    STAMP: _rule(
        STAMP,
        _expression("immediate", wire.be32(1, _REGISTER), wire.nest(2, _VALUE_OF_STAMP)),
        _expression("ct", wire.be32(2, _MARK_KEY), wire.be32(4, _REGISTER)),
        _ACCEPT,
    ),
}
"""The two rules, with a blank in place of the stamp: encoded once, as every change needs them."""
