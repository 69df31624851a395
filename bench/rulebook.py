"""A tenant with many rules, as a node receives it from the store: groups, each with a policy and a workload.

A group's policy denies all ingress but some ports, each of which is allowed from one other group, or from an address
range. The workload of the first group is the server, that of the second the client. Every group has a workload on this
node and one on another, so that every rule is relevant on this node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.support.policy_testbed import TENANT

from weft.agent.dataplane.policy import TenantPolicy
from weft.domain import kinds, model
from weft.domain.addresses import Address, address_hex
from weft.domain.cluster import Cluster
from weft.domain.codec import encode
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import StateItem
from weft.domain.ids import EndpointId, GroupName, NetworkName, NodeName, PolicyName, RuleId, StoreKey
from weft.domain.ipam.allocator import BLOCK_SIZE
from weft.domain.store_types import Change, Entry, Event, Listing

GROUPS, RULES_EACH = 1_000, 10
# The first allowed port, for the next group.
OPEN = 4243
HERE, ELSEWHERE = NodeName("here"), NodeName("elsewhere")
_NETWORK = NetworkName("net")
_LOCAL, _REMOTE, _RANGES = 0x0A000001, 0x0A010000, 0x0A800000  # 10.0.0.1, 10.1.0.0, 10.128.0.0
# The distance of two ranges of 16 addresses, so that none are merged.
_RANGE_STEP = 32

# Makes rule `number` (from 1) of a group.
MakeRule = Callable[[int, int], model.Rule]


class Rulebook:
    """The objects, and their compiled policy on this node."""

    def __init__(self, rules: int, make_rule: MakeRule) -> None:
        self._cluster = Cluster()
        self._revision = 1
        entries = (Entry(_key(each), encode(each), 1) for each in _objects(rules, make_rule))
        self._cluster.replace(Listing((*_blocks(), *entries), 1))

    def full_sync(self) -> Difference[StateItem]:
        """The complete state, as for the first workload of the tenant."""
        ours = [each for each in self._cluster.all(kinds.ENDPOINT, TENANT) if each.host == HERE]
        self._policy = TenantPolicy(self._cluster, TENANT, node=HERE, attached=ours)
        return self._refresh()

    def put(self, rule: model.Rule) -> Difference[StateItem]:
        """The state changes of a new rule."""
        return self._apply(rule, encode(rule))

    def drop(self, rule: model.Rule) -> Difference[StateItem]:
        """The state changes of a deleted rule."""
        return self._apply(rule, None)

    def _apply(self, rule: model.Rule, value: bytes | None) -> Difference[StateItem]:
        self._revision += 1
        key = _key(rule)
        self._cluster.apply(Change(self._revision, (Event(key, value),)))
        self._policy.follow(key)
        return self._refresh()

    def _refresh(self) -> Difference[StateItem]:
        return self._policy.refresh()  # type: ignore[return-value]  # a policy item is a state item


def exact_rule(group: int, number: int) -> model.Rule:
    """Allows a port of a group from another group."""
    return _allow_rule(group, number, from_endpoint_group=_name((group + number) % GROUPS))


def range_rule(group: int, number: int) -> model.Rule:
    """Allows a port of a group from an address range of no other rule."""
    block = Address(4, _RANGES + (group * RULES_EACH + number) * _RANGE_STEP)
    return _allow_rule(group, number, from_ip_address=f"{block}/28")


def _allow_rule(group: int, number: int, **remote: str) -> model.Rule:
    return model.Rule(
        tenant=TENANT,
        policy=PolicyName(_name(group)),
        rule_id=RuleId(str(number)),
        direction="in",
        priority=2,
        protocol="tcp",
        port=OPEN + number - 1,
        action="allow",
        **remote,
    )


def _deny_rule(group: int) -> model.Rule:
    policy = PolicyName(_name(group))
    return model.Rule(tenant=TENANT, policy=policy, rule_id=RuleId("0"), direction="in", action="deny")


def _objects(rules: int, make_rule: MakeRule) -> Iterator[model.Value]:
    """The network, the groups, and the policies for this number of rules."""
    yield model.Network(tenant=TENANT, name=_NETWORK, encap="vxlan", subnet="10.0.0.0/9")
    for group in range(GROUPS):
        has_policy = group * RULES_EACH < rules
        policies = (PolicyName(_name(group)),) if has_policy else ()
        yield model.Group(
            tenant=TENANT, name=GroupName(_name(group)), network=_NETWORK, policies=policies, group_id=group + 1
        )
        yield _endpoint(group, _REMOTE + group, ELSEWHERE)
        if has_policy:
            yield model.Policy(tenant=TENANT, name=PolicyName(_name(group)))
            yield _deny_rule(group)
            yield from (make_rule(group, number) for number in range(1, RULES_EACH))
        yield _endpoint(group, _LOCAL + group, HERE)


def _blocks() -> Iterator[Entry]:
    """The blocks of both nodes, without which their endpoints would be ignored."""
    for start, owner in ((_LOCAL - 1, HERE), (_REMOTE, ELSEWHERE)):
        for first in range(start, start + GROUPS + 1, BLOCK_SIZE):
            key = StoreKey(kinds.blocks_of(TENANT, _NETWORK) + address_hex(Address(4, first)))
            yield Entry(key, encode(model.Block(owner=owner)), 1)


def _endpoint(group: int, address: int, host: NodeName) -> model.Endpoint:
    return model.Endpoint(
        tenant=TENANT,
        network=_NETWORK,
        endpoint_id=EndpointId(f"{host}-{group}"),
        group=_name(group),
        ip_address=str(Address(4, address)),
        host=host,
    )


def _name(group: int) -> str:
    return f"g{group}"


def _key(value: model.Value) -> StoreKey:
    kind = next(each for each in kinds.ALL if isinstance(value, each.type))
    return kind.store_key(*kind.key_parts(value))
