"""All targets, by name."""

from __future__ import annotations

from tests.support.fuzz import dns_targets, kubernetes_targets, node_targets, ovs_targets, store_targets

TARGETS = {
    target.name: target
    for module in (node_targets, dns_targets, ovs_targets, store_targets, kubernetes_targets)
    for target in module.TARGETS
}
