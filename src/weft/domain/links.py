"""Links between objects, as Contiv shows them in `links` and `link-sets` (contiv 2.1, 2.2).

Links are computed from the references in objects and never stored, so that they cannot become stale (W8).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.kinds import Kind

Link = dict[str, str]
LinkSets = dict[str, dict[str, Link]]

# The spelling of the set names is Contiv's.
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
    """All links of the cluster, collected in one pass for one request."""

    def __init__(self, cluster: Cluster) -> None:
        # By kind name and REST key, as requests name objects.
        self._sets: dict[tuple[str, str], LinkSets] = defaultdict(lambda: defaultdict(dict))
        for name, kind in _TENANT_SETS:
            for value in cluster.all(kind):
                self._add(kinds.TENANT, value.tenant, name, _link(kind, *kind.key_parts(value)))
        for group in cluster.all(kinds.GROUP):
            own = _link(kinds.GROUP, *group.key)
            self._add(kinds.NETWORK, f"{group.tenant}:{group.network}", "EndpointGroups", own)
            for policy in group.policies:
                self._add(kinds.POLICY, f"{group.tenant}:{policy}", "EndpointGroups", own)
                self._add(kinds.GROUP, str(group.key), "Policies", _link(kinds.POLICY, group.tenant, policy))
            if group.net_profile:
                self._add(kinds.PROFILE, f"{group.tenant}:{group.net_profile}", "EndpointGroups", own)
        for service in cluster.all(kinds.SERVICE):
            own = _link(kinds.SERVICE, service.tenant, service.name)
            self._add(kinds.NETWORK, f"{service.tenant}:{service.network}", "Servicelbs", own)
        for rule in cluster.all(kinds.RULE):
            self._add_rule(rule)

    def _add_rule(self, rule: model.Rule) -> None:
        own = _link(kinds.RULE, rule.tenant, rule.policy, rule.rule_id)
        self._add(kinds.POLICY, f"{rule.tenant}:{rule.policy}", "Rules", own)
        self._add(kinds.RULE, own["key"], "Policies", _link(kinds.POLICY, rule.tenant, rule.policy))
        for group in (rule.from_endpoint_group, rule.to_endpoint_group):
            if group:
                self._add(kinds.GROUP, f"{rule.tenant}:{group}", "MatchRules", own)

    def _add(self, kind: Kind[Any], key: str, name: str, link: Link) -> None:
        self._sets[kind.name, key][name][link["key"]] = link

    def sets_of(self, kind: Kind[Any], key: str) -> LinkSets:
        """The `link-sets` of an object: name -> key -> link."""
        return {name: dict(links) for name, links in self._sets.get((kind.name, key), {}).items()}


def links_of(value: model.Value) -> dict[str, Link]:
    """The `links` of an object: the objects it belongs to."""
    links: dict[str, Link] = {}
    # Nodes, globals and Bgp objects have no tenant.
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
