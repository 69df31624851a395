"""Policy epochs: the conntrack mark of allowed connections, and the rules that compare and set it.

Every policy change starts a new epoch in the same transaction, so connections allowed before are evaluated again. The
epoch is a constant in rules and not an element of a set: a packet sees the rules of one generation from beginning to
end, while sets change under it. So a packet that was evaluated with old sets never gets a mark of the new epoch.

The forward hooks begin with the rule that accepts the current mark and go to policy evaluation by the next one.
Connections of which every packet needs further processing get the mark with the slow-path bit, which these hooks do
not accept.
"""

from __future__ import annotations

from weft.adapters.netns.nft.entries import TABLE
from weft.adapters.netns.nft.policy_chains import CT_FASTPATH, CT_MARK_ACCEPT, CT_MARK_ACCEPT_SLOW, EVAL_CHAINS
from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.nft_set import mark, table_header, verdict_data
from weft.kernel.uapi.netlink import NLM_F_APPEND, NLM_F_CREATE
from weft.kernel.uapi.nf_tables import (
    NF_ACCEPT,
    NFNL_SUBSYS_NFTABLES,
    NFPROTO_INET,
    NFT_CMP_EQ,
    NFT_CT_MARK,
    NFT_GOTO,
    NFT_MSG_DELRULE,
    NFT_MSG_NEWRULE,
    NFT_REG_1,
    NFT_REG_VERDICT,
    NFTA_CMP_DATA,
    NFTA_CMP_OP,
    NFTA_CMP_SREG,
    NFTA_CT_DREG,
    NFTA_CT_KEY,
    NFTA_CT_SREG,
    NFTA_DATA_VALUE,
    NFTA_EXPR_DATA,
    NFTA_EXPR_NAME,
    NFTA_IMMEDIATE_DATA,
    NFTA_IMMEDIATE_DREG,
    NFTA_LIST_ELEM,
    NFTA_RULE_CHAIN,
    NFTA_RULE_EXPRESSIONS,
)

_NEW_RULE = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_NEWRULE
_DELETE_RULE = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_DELRULE

# Set in every epoch mark, and in no other conntrack mark.
_EPOCH_BIT = 0x40000000
# Set in the marks of slow-path connections.
_SLOW_PATH_BIT = 0x20000000


def epoch_mark(generation: int) -> int:
    """Return a mark that was never used in a namespace whose nf_tables generation is at most this one."""
    # 29 bits: a mark repeats only after 500 million policy changes.
    return _EPOCH_BIT | generation & (_SLOW_PATH_BIT - 1)


def slow_path_mark(epoch: int) -> int:
    """Return the mark of the same epoch for slow-path connections."""
    return epoch | _SLOW_PATH_BIT


def epoch_commands(epoch: int) -> str:
    """Return the nft commands that replace the rules of the epoch."""
    rules = {
        CT_FASTPATH: [f"ct mark {epoch:#x} accept", f"ct mark {slow_path_mark(epoch):#x} accept"],
        CT_MARK_ACCEPT: [f"ct mark set {epoch:#x} accept"],
        CT_MARK_ACCEPT_SLOW: [f"ct mark set {slow_path_mark(epoch):#x} accept"],
        **{hook: [f"ct mark {epoch:#x} accept", f"goto {then}"] for hook, then in EVAL_CHAINS.items()},
    }
    return "".join(f"flush chain inet {TABLE} {chain}\n" for chain in rules) + "".join(
        f"add rule inet {TABLE} {chain} {rule}\n" for chain, chain_rules in rules.items() for rule in chain_rules
    )


def epoch_requests(epoch: int) -> list[Request]:
    """Return the same as netlink requests, for `apply_changes`."""
    fast, slow = mark(epoch), mark(slow_path_mark(epoch))
    return [
        *_FLUSH,
        *(
            Request(
                _NEW_RULE,
                NLM_F_CREATE | NLM_F_APPEND,
                rule.replace(_PLACEHOLDER, fast).replace(_SLOW_PLACEHOLDER, slow),
                "add rule to chain",
                chain,
            )
            for chain, rule in _RULES
        ),
    ]


def _chain(chain: str) -> bytes:
    return table_header(NFPROTO_INET, TABLE) + codec.text(NFTA_RULE_CHAIN, chain)


def _rule(chain: str, *expressions: bytes) -> bytes:
    return _chain(chain) + codec.nest(NFTA_RULE_EXPRESSIONS, *expressions)


def _expression(name: str, *data: bytes) -> bytes:
    return codec.nest(NFTA_LIST_ELEM, codec.text(NFTA_EXPR_NAME, name), codec.nest(NFTA_EXPR_DATA, *data))


# Neither value can be an epoch mark: both lack the epoch bit.
_PLACEHOLDER, _SLOW_PLACEHOLDER = mark(_EPOCH_BIT - 1), mark(_EPOCH_BIT - 2)
_ACCEPT = _expression(
    "immediate",
    codec.be32(NFTA_IMMEDIATE_DREG, NFT_REG_VERDICT),
    codec.nest(NFTA_IMMEDIATE_DATA, verdict_data(NF_ACCEPT)),
)


def _accept_marked(chain: str, placeholder: bytes) -> bytes:
    return _rule(
        chain,
        _expression("ct", codec.be32(NFTA_CT_DREG, NFT_REG_1), codec.be32(NFTA_CT_KEY, NFT_CT_MARK)),
        _expression(
            "cmp",
            codec.be32(NFTA_CMP_SREG, NFT_REG_1),
            codec.be32(NFTA_CMP_OP, NFT_CMP_EQ),
            codec.nest(NFTA_CMP_DATA, codec.attribute(NFTA_DATA_VALUE, placeholder)),
        ),
        _ACCEPT,
    )


def _set_mark(chain: str, placeholder: bytes) -> bytes:
    return _rule(
        chain,
        _expression(
            "immediate",
            codec.be32(NFTA_IMMEDIATE_DREG, NFT_REG_1),
            codec.nest(NFTA_IMMEDIATE_DATA, codec.attribute(NFTA_DATA_VALUE, placeholder)),
        ),
        _expression("ct", codec.be32(NFTA_CT_KEY, NFT_CT_MARK), codec.be32(NFTA_CT_SREG, NFT_REG_1)),
        _ACCEPT,
    )


def _goto(chain: str, then: str) -> bytes:
    verdict = codec.nest(NFTA_IMMEDIATE_DATA, verdict_data(NFT_GOTO, then))
    return _rule(chain, _expression("immediate", codec.be32(NFTA_IMMEDIATE_DREG, NFT_REG_VERDICT), verdict))


# The rules by chain, with placeholders for the marks. They are encoded once, because every change sends all of them.
_RULES = (
    (CT_FASTPATH, _accept_marked(CT_FASTPATH, _PLACEHOLDER)),
    (CT_FASTPATH, _accept_marked(CT_FASTPATH, _SLOW_PLACEHOLDER)),
    (CT_MARK_ACCEPT, _set_mark(CT_MARK_ACCEPT, _PLACEHOLDER)),
    (CT_MARK_ACCEPT_SLOW, _set_mark(CT_MARK_ACCEPT_SLOW, _SLOW_PLACEHOLDER)),
    *(
        (hook, rule)
        for hook, then in EVAL_CHAINS.items()
        for rule in (_accept_marked(hook, _PLACEHOLDER), _goto(hook, then))
    ),
)
# NFT_MSG_DELRULE without a handle deletes every rule of the chain.
_FLUSH = tuple(
    Request(_DELETE_RULE, 0, _chain(chain), "flush chain", chain) for chain in dict.fromkeys(name for name, _ in _RULES)
)
