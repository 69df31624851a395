"""Policies and their rules."""

from __future__ import annotations

from weft.domain import kinds, model
from weft.domain.addresses import parse_address
from weft.domain.errors import Conflict, Invalid
from weft.domain.store_types import Delete, DeleteAll, Write
from weft.domain.transaction import ReadSet, put
from weft.domain.validation import parse_rule_address


def put_policy(reading: ReadSet, wanted: model.Policy, present: model.Policy | None) -> list[Write]:
    reading.require(kinds.TENANT, wanted.tenant, field="tenantName")
    return [] if wanted == present else [put(kinds.POLICY, wanted)]


def delete_policy(reading: ReadSet, present: model.Policy) -> list[Write]:
    """`Conflict` while a group has it. Its rules are deleted in the same commit (W4)."""
    groups = [
        kinds.GROUP.key_text(group)
        for group in reading.all(kinds.GROUP, present.tenant)
        if present.name in group.policies
    ]
    if groups:
        raise Conflict(
            f"policy {present.name!r} is attached to {', '.join(groups[:5])}: detach it first",
            details={"groups": groups[:100]},
        )
    return [
        Delete(kinds.POLICY.store_key(present.tenant, present.name)),
        DeleteAll(kinds.RULE.store_prefix(present.tenant, present.name)),
    ]


def put_rule(reading: ReadSet, wanted: model.Rule, present: model.Rule | None) -> list[Write]:
    """A rule is immutable, because its id explains drops; a request for the present one is fine."""
    if present is not None:
        if wanted != present:
            raise Conflict(
                f"rule {wanted.rule_id!r} of policy {wanted.policy!r} exists and cannot change: delete it first or use "
                "another ruleId",
                field="ruleId",
            )
        return []
    reading.require(kinds.TENANT, wanted.tenant, field="tenantName")
    policy = reading.require(kinds.POLICY, wanted.tenant, wanted.policy, field="policyName")
    # Required at creation only: deleted later, the rule matches nothing (W23).
    for name, field in (
        (wanted.from_endpoint_group, "fromEndpointGroup"),
        (wanted.to_endpoint_group, "toEndpointGroup"),
    ):
        if name:
            reading.require(kinds.GROUP, wanted.tenant, name, field=field)
    for name, field in ((wanted.from_network, "fromNetwork"), (wanted.to_network, "toNetwork")):
        if name:
            reading.require(kinds.NETWORK, wanted.tenant, name, field=field)
    if wanted.direction == "in" and wanted.to_ip_address:
        _check_own_address(reading, policy, wanted)
    return [put(kinds.RULE, wanted)]


def _check_own_address(reading: ReadSet, policy: model.Policy, wanted: model.Rule) -> None:
    """`in` with toIpAddress limits the rule to endpoints of the only group with this policy (contiv 2.3)."""
    groups = [group for group in reading.all(kinds.GROUP, policy.tenant) if policy.name in group.policies]
    if len(groups) != 1:
        raise Invalid(
            f"toIpAddress in an incoming rule needs the policy to be attached to exactly one group, not {len(groups)}",
            field="toIpAddress",
        )
    destination = parse_rule_address(wanted.to_ip_address, field="toIpAddress")
    for endpoint in reading.cluster.group_members(groups[0]):
        for text in (endpoint.ip_address, endpoint.ipv6_address):
            if text and destination.holds(parse_address(text, field="ipAddress")):
                reading.get(kinds.ENDPOINT, *endpoint.key)  # compared: it must still exist at the commit
                return
    raise Invalid(
        f"toIpAddress {wanted.to_ip_address} is not an address of an endpoint of group {groups[0].key}",
        field="toIpAddress",
    )


def delete_rule(_: ReadSet, present: model.Rule) -> list[Write]:
    return [Delete(kinds.RULE.store_key(present.tenant, present.policy, present.rule_id))]
