"""Store objects for Kubernetes Namespaces and NetworkPolicies. The leading netmaster writes them, all nodes read them.

They belong to no tenant: a policy selects the pods of its namespace, in whatever tenants these are.
"""

from __future__ import annotations

from msgspec import field
from msgspec.structs import replace

from weft.domain.model import PolicyMode, Value
from weft.domain.policy.model.netpol import MODE_ANNOTATION, Metadata, NetworkPolicy, PolicySpec


class KubeNamespace(Value, frozen=True, kw_only=True):
    """A namespace. Policies select by its labels; its `io.contiv.*` labels are the defaults of its pods."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


class KubePolicy(Value, frozen=True, kw_only=True):
    """A NetworkPolicy. `fault` says what could not be decoded; rules concerned by it allow nothing."""

    namespace: str
    name: str
    # The uid of the API object, to which Events about the policy refer.
    uid: str = ""
    mode: PolicyMode = "enforce"
    spec: PolicySpec = PolicySpec()
    fault: str = ""

    @property
    def audit(self) -> bool:
        return self.mode == "audit"

    @property
    def policy(self) -> NetworkPolicy:
        """The policy as the engine takes it."""
        annotations = {MODE_ANNOTATION: str(self.mode)} if self.audit else None
        metadata = Metadata(name=self.name, namespace=self.namespace, annotations=annotations)
        return NetworkPolicy(metadata=metadata, spec=self.spec)

    def fail_closed(self, fault: str) -> KubePolicy:
        """Return the policy without its rules: it isolates the same pods and allows them nothing."""
        # The types are spelled out, because without rules their defaults would not include Egress.
        isolates = {"Ingress": self.spec.isolates_ingress, "Egress": self.spec.isolates_egress}
        types = tuple(kind for kind, isolated in isolates.items() if isolated)
        return replace(self, spec=PolicySpec(pod_selector=self.spec.pod_selector, policy_types=types), fault=fault)
