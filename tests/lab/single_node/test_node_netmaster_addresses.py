"""The listen addresses of netmaster, queried from another machine and from its own (contiv 10.2: B5 to B7)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weft.lab.netlab import NetLab
from weft.lab.servers.certificates import Authority
from weft.lab.servers.processes import DEADLINE, Child, free_port
from weft.lab.waiting import until

# The address of the lab's own machine, where netmaster runs, on the underlay.
OWN = "192.0.2.254"
TOKEN = "a-token-of-24-characters"


@pytest.fixture
async def elsewhere(lab: NetLab) -> Path:
    """Another machine on the underlay."""
    return (await lab.host("one")).netns


def get_info(address: str, *, machine: Path | None = None) -> dict[str, Any] | None:
    """The answer of netmaster's `/info` at an address; `None` if the connection is refused."""
    curl = ["curl", "-sk", "--max-time", "5", "-H", f"Authorization: Bearer {TOKEN}", f"https://{address}/info"]
    place = ["nsenter", f"--net={machine}", "--"] if machine else []
    done = subprocess.run([*place, *curl], capture_output=True, check=False, timeout=DEADLINE)
    assert done.returncode in {0, 7}, done  # 7: could not connect
    info: dict[str, Any] | None = json.loads(done.stdout) if done.returncode == 0 else None
    return info


@contextmanager
def netmaster(directory: Path, *flags: str) -> Iterator[None]:
    certificate = Authority(directory / "tls").issue("master", subject="/CN=master")
    token = directory / "token"
    token.write_text(TOKEN)
    files = {
        "--tls-cert": certificate.cert,
        "--tls-key": certificate.key,
        "--token-file": token,
        "--data-dir": directory / "data",
        "--store-socket": directory / "store.sock",
    }
    named = [f"{name}={path}" for name, path in files.items()]
    with Child.python("weft.master.main", *named, *flags, log=directory / "log"):
        yield


async def test_the_external_address_alone(lab: NetLab, elsewhere: Path, tmp_path: Path) -> None:
    """B5."""
    port = free_port()
    with netmaster(tmp_path, "--external-address", f"{OWN}:{port}"):
        await until(lambda: get_info(f"{OWN}:{port}", machine=elsewhere) is not None)
        assert get_info(f"127.0.0.1:{port}") is None


async def test_the_same_internal_address(lab: NetLab, elsewhere: Path, tmp_path: Path) -> None:
    """B6."""
    address = f"{OWN}:{free_port()}"
    with netmaster(tmp_path, "--external-address", address, "--internal-address", address):
        await until(lambda: (get_info(address, machine=elsewhere) or {}).get("leader-ip") == address)


async def test_all_addresses_and_another_internal_port(lab: NetLab, elsewhere: Path, tmp_path: Path) -> None:
    """B7: the control port answers at its own address, and not on loopback."""
    external, internal = free_port(), free_port()
    with netmaster(tmp_path, "--external-address", f"0.0.0.0:{external}", "--internal-address", f"{OWN}:{internal}"):
        await until(lambda: get_info(f"{OWN}:{internal}", machine=elsewhere) is not None)
        assert get_info(f"{OWN}:{external}", machine=elsewhere) is not None
        assert get_info(f"127.0.0.1:{external}") is not None
        assert get_info(f"127.0.0.1:{internal}") is None
