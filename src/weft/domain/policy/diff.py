"""What a change of the state newly allows or blocks, in terms of groups and pods.

Workloads that no rule of either state can tell apart are compared once, for all services there are, cut into cells; so
are the addresses of the world. Only pairs with an end that the change concerns are looked at. Workloads that are not in
both states are left out: their coming and going is no change of policy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address

import msgspec

from weft.domain.policy.cells import AddressCells, ServiceCell, service_cells, service_texts
from weft.domain.policy.decide import Flow
from weft.domain.policy.engine import Engine, Verdict
from weft.domain.policy.identities import Identity, IdentityKey, identity_of_world
from weft.domain.policy.ranges import AddressRange, AddressSet, address_set
from weft.domain.policy.rules import Action, FlowRule, RuleId, UnitId
