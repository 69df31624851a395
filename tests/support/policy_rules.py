"""Write many rules in a lab with pod churn, and assert with packets that they are enforced."""

from __future__ import annotations

from collections.abc import Collection

from tests.support.connectivity import assert_connectivity, between

from weft.lab.hosts import Pod
from weft.lab.netlab import NetLab

# The first allowed port.
OPEN = 5000
_POLICY = "guard"


def group_of(network: str) -> str:
    """The group of a network to which the rules apply."""
    return f"guarded-{network}"


async def write_rules(lab: NetLab, *, rules: int, networks: Collection[str]) -> None:
    """Deny ingress to the groups of these networks, except on UDP ports from `OPEN` on, one rule per port."""
    (await lab.rest.put("policys", tenantName="default", policyName=_POLICY)).accepted()
    for network in networks:
        await lab.group(group_of(network), network=network, policies=[_POLICY])
    for number in range(rules):
        port = {"protocol": "udp", "port": OPEN + number - 1, "priority": 2, "action": "allow"}
        rule = port if number else {"priority": 1, "action": "deny"}
        key = {"tenantName": "default", "policyName": _POLICY, "ruleId": str(number), "direction": "in"}
        (await lab.rest.put("rules", **key, **rule)).accepted()


async def assert_rules_enforced(pods: Collection[Pod], *, rules: int) -> None:
    """Assert that the first and last allowed port are open between all pods, and others are closed, over IPv4."""
    last = OPEN + rules - 2
    open_ = between(pods, pods, f"udp/{OPEN}", f"udp/{last}")
    closed = between(pods, pods, f"udp/{last + 1}", f"tcp/{OPEN}", "icmp")
    await assert_connectivity(
        allowed=[each for each in open_ if each.family == 4], denied=[each for each in closed if each.family == 4]
    )
