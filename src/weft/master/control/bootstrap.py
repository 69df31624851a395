"""What exists from the first start: the tenant `default`, its network `default-net`, and the cluster's settings."""

from __future__ import annotations

from weft.domain import kinds, model
from weft.domain.addresses import Address, parse_subnet_v4
from weft.domain.ids import DEFAULT_NETWORK, DEFAULT_TENANT, GLOBAL_NAME
from weft.master.control.control import Condition, ControlPlane


async def first_start(control: ControlPlane, *, fwd_mode: model.FwdMode, encap: model.Encap, subnet: str) -> bool:
    """Make them all on the very first start. What was changed or deleted since then stays so (W5).

    The settings come last and mark the end: a start that died before is finished by the next.
    """
    cluster = control.cluster
    if cluster.get(kinds.GLOBAL, GLOBAL_NAME) is not None:
        return False
    tenant = model.Tenant(name=DEFAULT_TENANT, default_network=DEFAULT_NETWORK if subnet else "")
    await control.put(kinds.TENANT, tenant, Condition())
    if subnet and cluster.get(kinds.NETWORK, DEFAULT_TENANT, DEFAULT_NETWORK) is None:
        gateway = Address(4, parse_subnet_v4(subnet).usable.first)
        network = model.Network(
            tenant=DEFAULT_TENANT, name=DEFAULT_NETWORK, encap=encap, subnet=subnet, gateway=str(gateway)
        )
        await control.put(kinds.NETWORK, network, Condition())
    await control.put(kinds.GLOBAL, model.Global(fwd_mode=fwd_mode), Condition())
    return True
