"""Kubernetes' Namespace and NetworkPolicy as documents of the store: written by the leading master, read by all.

They belong to no tenant: a policy protects the pods of its namespace, whichever tenants these are in.
"""

from __future__ import annotations

from msgspec import field
from msgspec.structs import replace

from weft.domain.model import Value
from weft.domain.policy.model.netpol import Metadata, NetworkPolicy, PolicySpec


class KubeNamespace(Value, frozen=True, kw_only=True):
    """A namespace. Its labels are what policies select by, and those of ours are the defaults of its pods."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


class KubePolicy(Value, frozen=True, kw_only=True):
    """A NetworkPolicy. `fault` tells of what could not be read of it; such a rule allows nothing."""

    namespace: str
    name: str
    uid: str = ""
    dry_run: bool = False
    spec: PolicySpec = PolicySpec()
    fault: str = ""

    @property
    def policy(self) -> NetworkPolicy:
        """The policy itself."""
        annotations = {"weft/dry-run": "true"} if self.dry_run else None
        metadata = Metadata(name=self.name, namespace=self.namespace, annotations=annotations)
        return NetworkPolicy(metadata=metadata, spec=self.spec)

    def without_rules(self, fault: str) -> KubePolicy:
        """What is kept of it where its rules cannot be: it protects the same pods and allows them nothing."""
        isolates = {"Ingress": self.spec.isolates_ingress, "Egress": self.spec.isolates_egress}
        types = tuple(kind for kind, isolated in isolates.items() if isolated)
        return replace(self, spec=PolicySpec(pod_selector=self.spec.pod_selector, policy_types=types), fault=fault)
