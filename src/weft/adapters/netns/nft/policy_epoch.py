"""The stamp on connections that were let pass, and the rules that know it.

Every change of policy comes with a new stamp, in the same transaction: whatever was stamped before is judged anew. The
stamp is a constant of rules and not an element of a set, as a packet meets the rules of one moment from beginning to
end, while sets change under it: what was judged by old sets never gets a new stamp.

The hooks of what is forwarded begin with the rule that knows it, and lead on by the next. Connections of whose packets
more is to be asked have another stamp, that of the watched, which these hooks do not know.
"""

from __future__ import annotations

from weft.adapters.netns.nft.base import TABLE
from weft.adapters.netns.nft.policy_chains import KNOWN, STAMP, STAMP_WATCHED, UNKNOWN_CHAINS
from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import APPEND, CREATE, Request
from weft.kernel.netlink.nft_set import ACCEPT, GOTO, INET, SUBSYSTEM, mark, table_header, verdict_data

_NEW_RULE, _DELETE_RULE = (SUBSYSTEM << 8 | number for number in (6, 8))
_CHAIN, _EXPRESSIONS = 2, 4
_ITEM = 1
_NAME, _DATA = 1, 2
_VERDICT_REGISTER, _REGISTER = 0, 1
_VALUE = 1
_MARK_KEY = 3
_IS_EQUAL = 0

# The one is set in every stamp and in no other mark of a connection, the other in stamps of the watched.
_IS_STAMP, _IS_WATCHED = 0x40000000, 0x20000000


def stamp_of(generation: int) -> int:
    """A stamp that was never used before in a namespace whose nftables have reached this generation."""
    return _IS_STAMP | generation & (_IS_WATCHED - 1)


def watched(stamp: int) -> int:
    """The stamp of the same moment for connections that are watched."""
    return stamp | _IS_WATCHED


def stamp_commands(stamp: int) -> str:
    """The rules in nft's own language, in place of others."""
    rules = {
        KNOWN: [f"ct mark {stamp:#x} accept", f"ct mark {watched(stamp):#x} accept"],
        STAMP: [f"ct mark set {stamp:#x} accept"],
        STAMP_WATCHED: [f"ct mark set {watched(stamp):#x} accept"],
        **{hook: [f"ct mark {stamp:#x} accept", f"goto {then}"] for hook, then in UNKNOWN_CHAINS.items()},
    }
    return "".join(f"flush chain inet {TABLE} {chain}\n" for chain in rules) + "".join(
        f"add rule inet {TABLE} {chain} {rule}\n" for chain, some in rules.items() for rule in some
    )


def stamp_requests(stamp: int) -> list[Request]:
    """The same for `apply_changes`."""
    plain, other = mark(stamp), mark(watched(stamp))
    return [
        *_EMPTY,
        *(
            Request(
                _NEW_RULE,
                CREATE | APPEND,
                rule.replace(_BLANK, plain).replace(_BLANK_WATCHED, other),
                "add rule to chain",
                chain,
            )
            for chain, rule in _RULES
        ),
    ]


def _place(chain: str) -> bytes:
    return table_header(INET, TABLE) + codec.text(_CHAIN, chain)


def _rule(chain: str, *expressions: bytes) -> bytes:
    return _place(chain) + codec.nest(_EXPRESSIONS, *expressions)


def _expression(name: str, *data: bytes) -> bytes:
    return codec.nest(_ITEM, codec.text(_NAME, name), codec.nest(_DATA, *data))


_BLANK, _BLANK_WATCHED = mark(_IS_STAMP - 1), mark(_IS_STAMP - 2)
_ACCEPT = _expression("immediate", codec.be32(1, _VERDICT_REGISTER), codec.nest(2, verdict_data(ACCEPT)))


def _knows(chain: str, blank: bytes) -> bytes:
    return _rule(
        chain,
        _expression("ct", codec.be32(1, _REGISTER), codec.be32(2, _MARK_KEY)),
        _expression(
            "cmp", codec.be32(1, _REGISTER), codec.be32(2, _IS_EQUAL), codec.nest(3, codec.attribute(_VALUE, blank))
        ),
        _ACCEPT,
    )


def _stamps(chain: str, blank: bytes) -> bytes:
    return _rule(
        chain,
        _expression("immediate", codec.be32(1, _REGISTER), codec.nest(2, codec.attribute(_VALUE, blank))),
        _expression("ct", codec.be32(2, _MARK_KEY), codec.be32(4, _REGISTER)),
        _ACCEPT,
    )


def _leads_on(chain: str, then: str) -> bytes:
    verdict = verdict_data(GOTO, then)
    return _rule(chain, _expression("immediate", codec.be32(1, _VERDICT_REGISTER), codec.nest(2, verdict)))


# The rules by chain, with blanks in place of the stamps: encoded once, as every change needs them.
_RULES = (
    (KNOWN, _knows(KNOWN, _BLANK)),
    (KNOWN, _knows(KNOWN, _BLANK_WATCHED)),
    (STAMP, _stamps(STAMP, _BLANK)),
    (STAMP_WATCHED, _stamps(STAMP_WATCHED, _BLANK_WATCHED)),
    *((hook, rule) for hook, then in UNKNOWN_CHAINS.items() for rule in (_knows(hook, _BLANK), _leads_on(hook, then))),
)
_EMPTY = tuple(
    Request(_DELETE_RULE, 0, _place(chain), "empty chain", chain) for chain in dict.fromkeys(name for name, _ in _RULES)
)
