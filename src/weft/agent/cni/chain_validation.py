"""The guard before ADD: a network whose chain cannot work is refused, since its other plugins would say nothing."""

from __future__ import annotations

from weft.agent.cni.inflight_requests import Serve
from weft.cni.chains import Chains
from weft.cni.errors import CniError, Code
from weft.cni.request import Add, Request


def refusing_bad_chains(serve: Serve, chains: Chains) -> Serve:
    """The same use cases, but for an ADD to a network that a runtime's list chains with what cannot work beside us."""

    async def refuse_or_serve(request: Request) -> bytes:
        if isinstance(request, Add) and (fault := chains.fault(request.config.name)):
            raise CniError(Code.BAD_CONFIG, f"{fault}: take it out of the list")
        return await serve(request)

    return refuse_or_serve
