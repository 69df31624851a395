"""Many rules for a lab whose pods come and go, and the proof with packets that they are in force."""

from __future__ import annotations

from collections.abc import Collection

from tests.support.connectivity import assert_connectivity, between

from weft.lab.hosts import Pod
from weft.lab.netlab import NetLab

# The first port that is open.
OPEN = 5000
_POLICY = "guard"


def group_of(network: str) -> str:
    """The group of a network whose pods are guarded."""
    return f"guarded-{network}"


async def write_rules(lab: NetLab, *, rules: int, networks: Collection[str]) -> None:
    """Nobody speaks to pods of these networks' groups, but on UDP ports from `OPEN` on, one rule for each."""
    (await lab.rest.put("policys", tenantName="default", policyName=_POLICY)).accepted()
    for network in networks:
        await lab.group(group_of(network), network=network, policies=[_POLICY])
    for number in range(rules):
        port = {"protocol": "udp", "port": OPEN + number - 1, "priority": 2, "action": "allow"}
        rule = port if number else {"priority": 1, "action": "deny"}
        key = {"tenantName": "default", "policyName": _POLICY, "ruleId": str(number), "direction": "in"}
        (await lab.rest.put("rules", **key, **rule)).accepted()


async def rules_hold(pods: Collection[Pod], *, rules: int) -> None:
    """The first and the last open port are open between all of them, and nothing else is, over IPv4."""
    last = OPEN + rules - 2
    open_ = between(pods, pods, f"udp/{OPEN}", f"udp/{last}")
    shut = between(pods, pods, f"udp/{last + 1}", f"tcp/{OPEN}", "icmp")
    await assert_connectivity(
        passing=[each for each in open_ if each.family == 4], refused=[each for each in shut if each.family == 4]
    )
