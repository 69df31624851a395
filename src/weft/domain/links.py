"""Which objects belong together, as Contiv shows it in `links` and `link-sets` (contiv 2.1, 2.2).

Links are computed from the references that objects hold, never stored, so they cannot go stale (W8).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.kinds import Kind

Link = dict[str, str]
LinkSets = dict[str, dict[str, Link]]

_TENANT_SETS: tuple[tuple[str, Kind[Any]], ...] = (
    ("Networks", kinds.NETWORK),
    ("EndpointGroups", kinds.GROUP),
    ("Policies", kinds.POLICY),
    ("NetProfiles", kinds.PROFILE),
    ("Servicelbs", kinds.SERVICE),
)


def _link(kind: Kind[Any], *parts: str) -> Link:
    return {"type": kind.name, "key": ":".join(parts)}


class Links:
    """All links of the cluster, gathered in one pass; made for one request and thrown away."""

    def __init__(self, cluster: Cluster) -> None:
        self._sets: dict[tuple[str, str], LinkSets] = defaultdict(lambda: defaultdict(dict))
        for name, kind in _TENANT_SETS:
            for value in cluster.all(kind):
                self._add(kinds.TENANT, value.tenant, name, _link(kind, *kind.key_parts(value)))
        for group in cluster.all(kinds.GROUP):
            mine = _link(kinds.GROUP, *group.key)
            self._add(kinds.NETWORK, f"{group.tenant}:{group.network}", "EndpointGroups", mine)
            for policy in group.policies:
                self._add(kinds.POLICY, f"{group.tenant}:{policy}", "EndpointGroups", mine)
                self._add(kinds.GROUP, str(group.key), "Policies", _link(kinds.POLICY, group.tenant, policy))
            if group.net_profile:
                self._add(kinds.PROFILE, f"{group.tenant}:{group.net_profile}", "EndpointGroups", mine)
        for service in cluster.all(kinds.SERVICE):
            mine = _link(kinds.SERVICE, service.tenant, service.name)
            self._add(kinds.NETWORK, f"{service.tenant}:{service.network}", "Servicelbs", mine)
        for rule in cluster.all(kinds.RULE):
            self._add_rule(rule)

    def _add_rule(self, rule: model.Rule) -> None:
        mine = _link(kinds.RULE, rule.tenant, rule.policy, rule.rule_id)
        self._add(kinds.POLICY, f"{rule.tenant}:{rule.policy}", "Rules", mine)
        self._add(kinds.RULE, mine["key"], "Policies", _link(kinds.POLICY, rule.tenant, rule.policy))
        for group in (rule.from_endpoint_group, rule.to_endpoint_group):
            if group:
                self._add(kinds.GROUP, f"{rule.tenant}:{group}", "MatchRules", mine)

    def _add(self, kind: Kind[Any], key: str, name: str, link: Link) -> None:
        self._sets[kind.name, key][name][link["key"]] = link

    def sets_of(self, kind: Kind[Any], key: str) -> LinkSets:
        """The object's `link-sets`: name -> key -> link."""
        return {name: dict(links) for name, links in self._sets.get((kind.name, key), {}).items()}


def links_of(value: model.Value) -> dict[str, Link]:
    """The object's `links`: what it belongs to."""
    links: dict[str, Link] = {}
    tenant = getattr(value, "tenant", "")
    if tenant:
        links["Tenant"] = _link(kinds.TENANT, tenant)
    if isinstance(value, model.Group | model.Service):
        links["Network"] = _link(kinds.NETWORK, tenant, value.network)
    if isinstance(value, model.Group) and value.net_profile:
        links["NetProfile"] = _link(kinds.PROFILE, tenant, value.net_profile)
    if isinstance(value, model.Rule) and (group := value.from_endpoint_group or value.to_endpoint_group):
        links["MatchEndpointGroup"] = _link(kinds.GROUP, tenant, group)
    return links
