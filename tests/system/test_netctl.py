"""netctl against a real netmaster: every command once, in the order a user would."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from weft.ctl.netctl.commands import COMMANDS, NOUNS

DEADLINE = 60.0


class Netmaster:
    """A netmaster of our own on a free port, and netctl pointed at it."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{address}"
        self.used: set[str] = set()
        self._home = folder
        self._log = folder / "netmaster.log"
        flags = ["--external-address", address, "--data-dir", str(folder / "data")]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([sys.executable, "-m", "weft.master.main", *flags], stdout=log, stderr=log)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=DEADLINE):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        pytest.fail(f"netmaster is not ready: {self._log.read_text()}")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(DEADLINE)

    def netctl(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "weft.ctl.netctl.main", *line.split()],
            env={**os.environ, "NETMASTER": self.url, "HOME": str(self._home), "NETCTL_TOKEN": ""},
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE,
        )

    def succeeds(self, line: str) -> str:
        done = self.netctl(line)
        assert (done.returncode, done.stderr) == (0, ""), f"netctl {line}: {done.stderr}"
        self.used.add(_leaf(line))
        return done.stdout

    def post(self, path: str, body: dict[str, object]) -> None:
        """As an agent would."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=DEADLINE) as reply:
            assert reply.status == 200


class Step(NamedTuple):
    """A command, and what its output must hold; runs of blanks count as one."""

    line: str
    shows: tuple[str, ...] = ()


@pytest.fixture
def netmaster(tmp_path: Path) -> Iterator[Netmaster]:
    master = Netmaster(tmp_path)
    try:
        master.wait_until_ready()
        yield master
    finally:
        master.stop()


def _leaf(line: str) -> str:
    """The command of a line, by its full name."""
    words = line.split()
    for noun in NOUNS:
        if words[0] in noun.names:
            return f"{noun.names[0]} {next(each.names[0] for each in noun.commands if words[1] in each.names)}"
    return next(command.names[0] for command in COMMANDS if words[0] in command.names)


BEFORE_ENDPOINTS = [
    Step("version", ("Client version: ", "Server version: ")),
    Step("tenant create t1", ("t1 created\n",)),
    Step("tenant ls", ("default", "t1")),
    Step("global info", ("1-4094", "172.19.0.0/16", "proxy")),
    Step("global set --vxlan-range 1-5000", ("global changed: vxlans 1-10000 -> 1-5000\n",)),
    Step("global info --json", ('"vxlans": "1-5000"',)),
    Step("global inspect", ('"Config"', '"Oper"')),
    Step(
        "network create -t t1 -s 10.1.1.0/24 -g 10.1.1.254 -s6 2001:db8::/64 -g6 2001:db8::1 blue",
        ("t1:blue created\n",),
    ),
    Step("net ls -t t1", ("t1 blue data vxlan", "10.1.1.0/24 10.1.1.254", "2001:db8::/64")),
    Step("net list --all -q", ("default-net\n", "blue\n")),
    Step("netprofile create -t t1 -b 10Mbps -d 46 gold", ("t1:gold created\n",)),
    Step("netprofile ls -t t1", ("gold t1 10Mbps 46 0",)),
    Step("netprofile inspect -t t1 gold", ('"DSCP": 46',)),
    Step("policy create -t t1 p", ("t1:p created\n",)),
    Step("policy ls -t t1 -q", ("p\n",)),
    Step("group create -t t1 -p p -n gold -r 10.1.1.10-10.1.1.20 blue web", ("t1:web created\n",)),
    Step("group ls -t t1", ("t1 web blue 10.1.1.10-10.1.1.20",)),
    Step("policy rule-add -t t1 -d in -l tcp -P 80 -j allow -p 10 p 1", ("t1:p:1 created\n",)),
    Step("policy rule-add -t t1 -d out --to-group web -j deny p 2", ("t1:p:2 created\n",)),
    Step("policy rule-ls -t t1 p", ("Incoming Rules:", "tcp 80 allow", "Outgoing Rules:", "web", "deny")),
    Step("policy rule-ls -t t1 -q p", ("1\n", "2\n")),
    Step("bgp create n1 --router-ip 50.1.1.1/24 --as 65002 --neighbor-as 500 --neighbor 50.1.1.2", ("n1 created\n",)),
    Step("bgp ls", ("n1 50.1.1.1/24 65002 500 50.1.1.2",)),
    Step("bgp ls -q", ("n1\n",)),
    Step("bgp inspect n1", ('"hostname": "n1"',)),
    Step(
        "service create -t t1 -s blue -l app=web -p 80:8080:TCP --preferred-ipv6 2001:db8::9 shop",
        ("t1:shop created\n",),
    ),
    Step("service ls -t t1", ("shop t1 blue", "80:8080:TCP app=web")),
    Step("service inspect -t t1 shop", ('"serviceVip"', '"ipv6ServiceVip": "2001:db8::9"')),
]
WITH_AN_ENDPOINT = [
    Step("endpoint ls -t t1", ("t1 blue web e-0001 10.1.1.10",)),
    Step("node ls", ("Node Control address Tunnel address Version Applied rev Lag State",)),
    Step("node wait --wait=30"),
    Step("ep inspect 0001", ('"10.1.1.10"',)),
    Step("network inspect -t t1 blue", ('"numEndpoints": 1', "e-0001")),
    Step("group inspect -t t1 web", ('"numEndpoints": 1', "e-0001")),
    Step("policy inspect -t t1 p", ("e-0001",)),
    Step("tenant inspect t1", ('"totalNetworks": 1',)),
    Step("policy rule-add -t t1 -d in -j deny -p 50 p 3 --preview", ("blocked", "group t1:web", "contiv/t1/p/3")),
    Step("policy rule-rm -t t1 p 1 --preview", ("no verdict would change",)),
    Step("policy rule-ls -t t1 -q p", ("2\n1\n",)),
]
CLEAN_UP = [
    Step("service rm -t t1 shop"),
    Step("bgp delete n1"),
    Step("policy rule-rm -t t1 p 2"),
    Step("group rm -t t1 web"),
    Step("policy rm -t t1 p"),
    Step("netprofile rm -t t1 gold"),
    Step("network rm -t t1 blue"),
    Step("tenant rm t1 --wait", ("t1 deleted\n",)),
    Step("purge-kubernetes", ("purged 0 objects",)),
    Step("completion bash", ("complete -o bashdefault -F _shtab_netctl netctl",)),
]
ENDPOINT: dict[str, object] = {"TenantName": "t1", "NetworkName": "blue", "ServiceName": "web", "EndpointID": "e-0001"}


def test_every_command(netmaster: Netmaster, tmp_path: Path) -> None:
    """The life of a tenant (O4, O13, O14, O19, O21, E9, E10, E11; W25: only what is given is set)."""

    def take(steps: list[Step]) -> None:
        for step in steps:
            output = re.sub(" +", " ", netmaster.succeeds(step.line))
            assert not [text for text in step.shows if text not in output], f"netctl {step.line}:\n{output}"

    saved = tmp_path / "state.json"
    take(BEFORE_ENDPOINTS)
    netmaster.post("/plugin/createEndpoint", {**ENDPOINT, "ConfigEP": {"Container": "c-0001", "Host": "n1"}})
    take(WITH_AN_ENDPOINT)
    proposed = tmp_path / "changes.json"
    proposed.write_text(json.dumps([{"delete": "rules", "key": "t1:p:2"}]))
    assert "allowed" in netmaster.succeeds(f"policy diff {proposed}")
    netmaster.post("/plugin/deleteEndpoint", ENDPOINT)
    netmaster.succeeds(f"backup {saved}")
    take(CLEAN_UP)
    assert "t1" not in netmaster.succeeds("tenant ls -q").split()
    planned = netmaster.succeeds(f"restore --dry-run {saved}")
    assert "would create tenants/t1\n" in planned
    assert planned.endswith("objects would stay as they are\n")
    assert "t1" not in netmaster.succeeds("tenant ls -q").split()
    assert netmaster.succeeds(f"restore --force {saved}").startswith("restored ")
    assert netmaster.succeeds("group ls -t t1 -q") == "web\n"

    every = {f"{noun.names[0]} {command.names[0]}" for noun in NOUNS for command in noun.commands}
    assert netmaster.used == every | {command.names[0] for command in COMMANDS}


@pytest.mark.parametrize(
    "line", ["net ls -t missing", "policy rule-ls nothing", "tenant rm missing", "ep inspect none"]
)
def test_a_missing_object_is_an_error(netmaster: Netmaster, line: str) -> None:
    done = netmaster.netctl(line)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("netctl: ")
    assert "does not exist" in done.stderr or "no endpoint" in done.stderr


def test_an_error_names_the_field(netmaster: Netmaster) -> None:
    """O5: a gateway outside of its subnet."""
    done = netmaster.netctl("network create -s 10.1.1.0/24 -g 10.2.2.2 blue")
    assert done.returncode == 3
    assert "gateway" in done.stderr
    assert netmaster.netctl("network inspect blue").returncode == 3
