"""ADD to a network whose chain cannot work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.agent.cni.chain_validation import refusing_bad_chains
from weft.cni.chains import Chains
from weft.cni.errors import CniError, Code
from weft.cni.install import NAMES
from weft.cni.request import Request, parse_request


def request(verb: str) -> Request:
    environment = {"CNI_COMMAND": verb, "CNI_CONTAINERID": "c1", "CNI_NETNS": "/run/netns/c1", "CNI_IFNAME": "eth0"}
    return parse_request(environment, b'{"cniVersion": "1.0.0", "name": "blue", "type": "weft-cni"}')


async def test_only_add_is_refused_and_only_while_the_list_is_so(tmp_path: Path) -> None:
    """P-51: who was attached before can be taken off."""

    async def serve(request: Request) -> bytes:
        return b"served"

    guarded = refusing_bad_chains(serve, Chains(tmp_path, ours=NAMES))
    assert await guarded(request("ADD")) == b"served"
    file = tmp_path / "blue.conflist"
    file.write_text(json.dumps({"name": "blue", "plugins": [{"type": "weft-cni"}, {"type": "portmap"}]}))
    with pytest.raises(CniError, match="portmap") as refused:
        await guarded(request("ADD"))
    assert refused.value.code == Code.BAD_CONFIG
    assert await guarded(request("DEL")) == b"served"
    file.unlink()
    assert await guarded(request("ADD")) == b"served"
