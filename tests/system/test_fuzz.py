"""A fuzzer reads `/openapi.json` and sends what the document allows and what it does not: nothing may break."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from tests.support.address_audit import audit
from tests.support.fuzz.mutations import Form, Mutator

from weft.lab.servers.masters import MasterProcess, Rest, client

Document = dict[str, Any]

SERVES = "not_a_server_error"
AS_DESCRIBED = (
    "content_type_conformance", "status_code_conformance", "response_schema_conformance", "unsupported_method",
    "allow_header_conformance",
)  # fmt: skip

KEYS = {
    "tenants": ["default", "t1"],
    "networks": ["default:blue", "default:red"],
    "endpointGroups": ["default:web", "default:db"],
    "policys": ["default:p", "default:q"],
    "rules": ["default:p:1", "default:p:2"],
    "netprofiles": ["default:gold"],
    "serviceLBs": ["default:s"],
    "Bgps": ["n1"],
    "globals": ["global"],
    "endpoints": ["default:blue:e1", "default:blue:e2"],
}
# Words by which requests reach what exists, and each other's doings, instead of ending at the first unknown name.
FAMILIAR: dict[str, list[object]] = {
    "tenantName": ["default"], "networkName": ["blue", "red"], "groupName": ["web", "db"], "policyName": ["p", "q"],
    "ruleId": ["1", "2"], "profileName": ["gold"], "serviceName": ["s"], "hostname": ["n1"], "name": ["global"],
    "defaultNetwork": ["", "blue"], "netProfile": ["", "gold"], "policies": [[], ["p"], ["p", "q"], ["p", "p"]],
    "subnet": ["10.1.0.0/16", "10.9.0.0/24", "10.9.0.2-10.9.0.9/24", "10.9.0.0/31"], "gateway": ["", "10.9.0.5"],
    "ipv6Subnet": ["", "fd00::/64", "fd00::/126"], "ipv6Gateway": ["", "fd00::1"], "pktTag": [0, 1, 4094, 20_000],
    "ipPool": ["", "10.1.0.10-10.1.0.20", "10.9.0.7"], "fromEndpointGroup": ["", "web"], "toNetwork": ["", "red"],
    "fromIpAddress": ["", "10.1.0.0/24", "::/0"], "protocol": ["", "tcp", "udp", "17"], "port": [0, 80],
    "ipAddress": ["", "10.1.0.12", "10.9.0.3"], "selectors": [["a=b"], ["a=b", "c=d"]],
    "ports": [["80:8080:TCP"], ["80:80:TCP", "53:53:UDP"]], "bandwidth": ["", "4G"], "cfgdTag": [""],
    "routerip": ["50.1.1.2/24"], "as": ["65002"], "neighbor-as": ["500"], "neighbor": ["", "50.1.1.3"],
    "vlans": ["1-4094", "100-200", "7"], "vxlans": ["1-10000", "20000-30000"], "pvtSubnet": ["", "172.19.0.0/16"],
    "TenantName": ["default"], "NetworkName": ["blue", "red"], "EndpointID": ["e1", "e2", "e3"],
    "ServiceName": ["", "web", "db"], "NetworkID": ["blue.default", "red:db.default", "red.default|10.9.0.0/24"],
    "AddressPool": ["", "10.9.0.0/24"], "PreferredIPv4Address": ["", "10.1.0.12"], "IPv4Address": ["10.1.0.12/16"],
    "IPAddress": ["", "10.1.0.12", "10.9.0.7"], "IPv6Address": ["", "fd00::2"], "Host": ["", "n1"],
    "tenant": ["default"], "what": ["net", "group", "ep"], "id": ["blue", "web", "e1", "s:default"],
    "src": ["e1", "10.1.0.12"], "dst": ["e2", "web"], "service": ["tcp/80", "icmp"],
}  # fmt: skip


async def populate(rest: Rest) -> None:
    """Some of what the familiar words name."""
    for network, subnet in (("blue", "10.1.0.0/16"), ("red", "10.9.0.0/24")):
        members: dict[str, object] = {
            "tenantName": "default",
            "networkName": network,
            "encap": "vxlan",
            "subnet": subnet,
        }
        (await rest.put("networks", **members)).accepted()
    (await rest.put("policys", tenantName="default", policyName="p")).accepted()
    for group, network in (("web", "blue"), ("db", "red")):
        members = {"tenantName": "default", "groupName": group, "networkName": network, "policies": ["p"]}
        (await rest.put("endpointGroups", **members)).accepted()
    (await rest.create_endpoint("e1", network="blue", group="web")).accepted()


async def describe(rest: Rest) -> Document:
    """The document, less what makes an answer endless, or makes it right to say 504 after a moment."""
    document: Document = (await rest.send("GET", "/openapi.json")).accepted()
    for path in document["paths"].values():
        for operation in path.values():
            operation["parameters"] = [
                each for each in operation["parameters"] if each["name"] not in {"watch", "wait"}
            ]
    return document


def in_familiar_words(document: Document) -> Document:
    """The document with few values, but good ones, for what has a name in it."""
    for path, operations in document["paths"].items():
        known = FAMILIAR | {"key": next((keys for plural, keys in KEYS.items() if f"/{plural}/" in path), [])}
        for operation in operations.values():
            for parameter in operation["parameters"]:
                if words := known.get(parameter["name"]):
                    parameter["schema"] = {"enum": words}
    for schema in document["components"]["schemas"].values():
        for name in FAMILIAR.keys() & schema.get("properties", {}).keys():
            schema["properties"][name] = {"enum": FAMILIAR[name]}
    return document


def run_fuzzer(
    directory: Path, document: Document, url: str, *, checks: tuple[str, ...], seconds: int
) -> subprocess.CompletedProcess[str]:
    """Let the fuzzer work for about so long."""
    file = directory / "openapi.json"
    file.write_bytes(msgspec.json.encode(document))
    # One worker: CPython 3.11 loses count in ast.parse when two threads of the fuzzer are in it.
    command = (
        str(Path(sys.executable).with_name("schemathesis")), "run", str(file), "--url", url,
        "--phases", "coverage,fuzzing", "--checks", ",".join(checks), "--max-time", str(seconds), "--workers", "1",
        "--continue-on-failure", "--generation-database", "none", "--warnings", "off", "--no-color",
    )  # fmt: skip
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=4 * seconds + 60, check=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [20, pytest.param(900, marks=[pytest.mark.soak, pytest.mark.timeout(4000)])])
@pytest.mark.parametrize("familiar", [False, True])
async def test_no_request_causes_an_internal_error(tmp_path: Path, seconds: int, *, familiar: bool) -> None:
    """No operation answers 5xx, or other than described, whatever it is sent; and what is stored stays sound."""
    async with MasterProcess(tmp_path, "--leader-ttl", "60") as master, client(master.url) as rest:
        document = await describe(rest)
        if familiar:
            await populate(rest)
            document = in_familiar_words(document)
        checks = (SERVES,) if familiar else (SERVES, *AS_DESCRIBED)
        ended = await asyncio.to_thread(run_fuzzer, tmp_path, document, master.url, checks=checks, seconds=seconds)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        (await rest.send("GET", "/readyz")).accepted()
        state = await rest.state()
        assert audit({key: msgspec.json.encode(entry) for key, entry in state.items()}) == []
        assert "Traceback" not in master.log.read_text()


SEED = int(os.environ.get("WEFT_FUZZ_SEED", "18"))
BODIES: dict[str, Document] = {
    "tenants/t1": {"tenantName": "t1", "defaultNetwork": ""},
    "networks/default:red": {
        "tenantName": "default",
        "networkName": "red",
        "encap": "vxlan",
        "subnet": "10.9.0.0/24",
        "gateway": "10.9.0.1",
    },
    "endpointGroups/default:web": {
        "tenantName": "default",
        "groupName": "web",
        "networkName": "blue",
        "policies": ["p"],
        "ipPool": "10.1.0.10",
    },
    "policys/default:p": {"tenantName": "default", "policyName": "p"},
    "rules/default:p:1": {
        "tenantName": "default",
        "policyName": "p",
        "ruleId": "1",
        "direction": "in",
        "action": "allow",
        "port": 80,
        "protocol": "tcp",
        "fromIpAddress": "10.0.0.0/8",
    },
    "serviceLBs/default:s": {
        "tenantName": "default",
        "serviceName": "s",
        "networkName": "blue",
        "selectors": ["a=b"],
        "ports": ["80:80:TCP"],
    },
    "globals/global": {"name": "global", "vlans": "1-4094", "vxlans": "1-10000"},
}
PATHS = (
    *(f"/api/v1/{key}/" for key in BODIES),
    "/api/v1/inspect/endpoints/e1/",
    "/api/v1/trace?src=e1&dst=web&service=tcp/80",
    "/api/v1/backup",
    "/readyz",
    "/metrics",
    "/openapi.json",
    "/api/v1/endpoints/?tenant=default",
)


def request_bytes(method: str, path: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Requests:
    """Requests by number: valid ones with hostile bodies or paths, and ones that are hardly HTTP."""

    def __init__(self) -> None:
        self._bodies = Mutator([msgspec.json.encode(body) for body in BODIES.values()], form=Form.JSON)
        self._paths = Mutator([path.encode() for path in PATHS], words=(b"%00", b"%ff", b"?", b"&", b"=", b"%2f", b":"))
        whole = [request_bytes("PUT", f"/api/v1/{key}/", msgspec.json.encode(body)) for key, body in BODIES.items()]
        self._whole = Mutator(
            whole, words=(b"\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"\0")
        )

    def input(self, number: int) -> bytes:
        rng = Random(f"rest:{SEED}:{number}")
        method = rng.choice(("GET", "PUT", "POST", "DELETE"))
        if number % 3 == 0:
            return request_bytes(
                rng.choice(("PUT", "POST")), f"/api/v1/{rng.choice([*BODIES])}/", self._bodies.input(rng)
            )
        if number % 3 == 1:
            path = self._paths.input(rng).decode("latin-1").replace(" ", "%20").replace("\r", "").replace("\n", "")
            return request_bytes(method, path, self._bodies.input(rng) if rng.random() < 0.3 else b"")
        return self._whole.input(rng)


async def status_of(address: str, data: bytes) -> int:
    """The status of the answer to these bytes; 0 when there is none."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(60):
            line = await reader.readline()
    except ConnectionError:
        return 0
    finally:
        writer.close()
    return int(line.split()[1]) if line.startswith(b"HTTP/") else 0


@pytest.mark.parametrize("inputs", [300, pytest.param(200_000, marks=[pytest.mark.soak, pytest.mark.timeout(4000)])])
async def test_no_bytes_cause_an_internal_error(tmp_path: Path, inputs: int) -> None:
    """Whatever bytes a client sends, no answer is 5xx; WEFT_FUZZ_SEED chooses others."""
    async with MasterProcess(tmp_path, "--leader-ttl", "60") as master, client(master.url) as rest:
        await populate(rest)
        requests = Requests()
        for number in range(inputs):
            status = await status_of(master.address, data := requests.input(number))
            assert status < 500, f"seed {SEED}, input {number}: {status} to {data!r}"
        (await rest.send("GET", "/readyz")).accepted()
        assert "Traceback" not in master.log.read_text()
