"""A fuzzer reads `/openapi.json` and sends what the document allows and what it does not: nothing may break."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weft.testing.audit import audit
from weft.testing.masters import MasterProcess, Rest, client

PHASES = ("examples", "coverage", "fuzzing")
CHECKS = ("not_a_server_error", "content_type_conformance")
FAMILIAR = {
    "key": ["default", "global", "default:blue", "default:web", "default:p", "default:p:1", "default:s", "default:e1"],
    "tenantName": ["default"],
    "networkName": ["blue"],
    "groupName": ["web"],
    "policyName": ["p"],
    "ruleId": ["1"],
    "subnet": ["10.1.0.0/16", "10.9.0.0/24", "10.9.0.2-10.9.0.9/24"],
    "ipPool": ["10.1.0.10-10.1.0.20"],
    "encap": ["vlan", "vxlan"],
    "tenant": ["default"],
    "what": ["net", "group", "ep"],
    "id": ["blue", "web", "e1", "s:default"],
    "TenantName": ["default"],
    "NetworkName": ["blue"],
    "NetworkID": ["blue.default", "blue:web.default"],
    "EndpointID": ["e1", "e2"],
    "ServiceName": ["web"],
}
"""Words by which random requests reach what exists, instead of ending at the first name that does not."""


async def populate(rest: Rest) -> None:
    """What the familiar words name."""
    default = {"tenantName": "default"}
    (await rest.put("networks", **default, networkName="blue", encap="vxlan", subnet="10.1.0.0/16")).accepted()
    (await rest.put("policys", **default, policyName="p")).accepted()
    rule = {"policyName": "p", "ruleId": "1", "direction": "in", "action": "deny"}
    (await rest.put("rules", **default, **rule)).accepted()
    (await rest.put("endpointGroups", **default, groupName="web", networkName="blue", policies=["p"])).accepted()
    service = {"serviceName": "s", "networkName": "blue", "selectors": ["a=b"], "ports": ["80:80:TCP"]}
    (await rest.put("serviceLBs", **default, **service)).accepted()
    (await rest.create_endpoint("e1", network="blue", group="web")).accepted()


async def describe(rest: Rest) -> dict[str, Any]:
    """The document with familiar words, and without the parameter that makes an answer endless."""
    document: dict[str, Any] = (await rest.send("GET", "/openapi.json")).accepted()
    for path in document["paths"].values():
        for operation in path.values():
            operation["parameters"] = [each for each in operation["parameters"] if each["name"] != "watch"]
            for parameter in operation["parameters"]:
                parameter["schema"] = _with_familiar(parameter["name"], parameter["schema"])
    for schema in document["components"]["schemas"].values():
        for name, member in schema.get("properties", {}).items():
            schema["properties"][name] = _with_familiar(name, member)
    return document


def _with_familiar(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"enum": FAMILIAR[name]}, schema]} if name in FAMILIAR else schema


def run_fuzzer(
    directory: Path, document: dict[str, Any], url: str, *, seconds: int
) -> subprocess.CompletedProcess[str]:
    """Let the fuzzer work for about so long."""
    file = directory / "openapi.json"
    file.write_bytes(msgspec.json.encode(document))
    command = (
        str(Path(sys.executable).with_name("schemathesis")), "run", str(file), "--url", url,
        "--phases", ",".join(PHASES), "--checks", ",".join(CHECKS), "--max-time", str(seconds), "--workers", "2",
        "--continue-on-failure", "--generation-database", "none", "--warnings", "off", "--no-color",
    )  # fmt: skip
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=4 * seconds + 60, check=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [40, pytest.param(900, marks=[pytest.mark.soak, pytest.mark.timeout(4000)])])
async def test_no_request_breaks_it(tmp_path: Path, seconds: int) -> None:
    """No operation answers 5xx or in an unknown form, whatever it is sent, and what is stored stays sound."""
    async with MasterProcess(tmp_path, "--leader-ttl", "60") as master, client(master.url) as rest:
        await populate(rest)
        ended = await asyncio.to_thread(run_fuzzer, tmp_path, await describe(rest), master.url, seconds=seconds)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "not_a_server_error" not in ended.stdout
        (await rest.send("GET", "/readyz")).accepted()
        state = await rest.state()
        assert audit({key: msgspec.json.encode(document) for key, document in state.items()}) == []
        assert "Traceback" not in master.log.read_text()
