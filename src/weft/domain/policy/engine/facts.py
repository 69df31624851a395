"""The objects that policy follows from: what the engine is told, and what its judge is told."""

from __future__ import annotations

from weft.domain.model import Endpoint, Group, Network, Policy, Rule
from weft.domain.policy.model.identities import ApiServer, Host, Namespace, Pod
from weft.domain.policy.model.netpol import NetworkPolicy

# One object of the cluster's state.
Fact = Pod | Namespace | Host | ApiServer | NetworkPolicy | Endpoint | Group | Policy | Rule | Network
