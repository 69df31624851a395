"""What `weft doctor` makes of what it finds; the lab shows it on real nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.ctl.weft import mtu_probe
from weft.ctl.weft.checks import (
    Check,
    Health,
    check_agent,
    check_cni,
    check_machine,
    check_names,
    check_networks,
    check_peers,
    check_spaces,
    check_switch,
)
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.drivers import datapath_tools
from weft.ports.datapath import Finding

WELL: dict[str, Any] = {
    "node": "one",
    "ports": [],
    "reasons": [],
    "storeInTouch": True,
    "realisedRevision": 7,
    "names": "served",
    "spaces": [{"tenant": "default", "faults": []}],
    "leaks": [],
    "vtepIp": "192.0.2.1",
    "mtu": 1450,
    "peers": [],
}


class Tools:
    """A datapath's tools that find what they are told to."""

    def __init__(self, *, lacking: list[str] | None = None, hazards: list[str] | None = None) -> None:
        self._lacking = lacking
        self._hazards = hazards or []

    def probe(self) -> list[str]:
        if self._lacking is None:
            raise DatapathFault("a new network namespace: Operation not permitted")
        return self._lacking

    def hazards(self) -> list[str]:
        return self._hazards

    def examine(self, switch: Path) -> Iterator[Finding]:
        yield Finding(name="database", text=f"{switch} answers")
        yield Finding(name="daemon", text="it is away", remedy="start it")
        yield Finding(name="bridge", text="others have a hand in it", remedy="see whose", stops_us=False)

    def enter(self, directory: Path, tenant: TenantName) -> None:
        raise AssertionError

    def enter_host_ends(self, directory: Path, tenant: TenantName) -> None:
        raise AssertionError

    def enter_workload(self, netns: Path) -> None:
        raise AssertionError

    def vacate(self, directory: Path) -> None:
        raise AssertionError


def healths(checks: list[Check]) -> dict[str, Health]:
    return {check.name: check.health for check in checks}


def test_a_machine_that_lacks_something_fails_and_a_foreign_firewall_warns() -> None:
    assert set(healths(list(check_machine(Tools(lacking=[]))))) == {"kernel", "firewall"}
    found = list(check_machine(Tools(lacking=["no vxlan"], hazards=["FORWARD drops"])))
    assert healths(found) == {"kernel": Health.FAILED, "firewall": Health.WARNING}
    assert all(check.hint for check in found)


def test_a_switch_is_told_of_as_it_is_found(tmp_path: Path) -> None:
    """What stops us fails, what may be meant so warns; where the datapath has no switch nothing is said."""
    found = list(check_switch(Tools(), tmp_path))
    assert healths(found) == {"database": Health.WELL, "daemon": Health.FAILED, "bridge": Health.WARNING}
    assert [check.hint for check in found] == ["", "start it", "see whose"]
    assert list(check_switch(datapath_tools("linux"), tmp_path)) == []


def test_without_root_it_says_so() -> None:
    (check,) = check_machine(Tools())
    assert (check.health, check.hint) == (Health.FAILED, "run weft doctor as root")


def test_a_chain_that_cannot_work_is_told_with_its_file(tmp_path: Path) -> None:
    """P-51, P-52."""
    (tmp_path / "87-podman.conflist").write_text('{"name": "p", "plugins": [{"type": "bridge"}, {"type": "portmap"}]}')
    (check,) = check_networks(tmp_path)
    assert (check.health, check.text) == (Health.WELL, f"0 networks in {tmp_path} call our plugin")
    ours = tmp_path / "10-weft.conflist"
    ours.write_text('{"name": "w", "plugins": [{"type": "weft-cni"}, {"type": "portmap"}]}')
    (check,) = check_networks(tmp_path)
    assert (check.name, check.health) == ("networks", Health.FAILED)
    assert f"{ours} chains portmap" in check.text
    assert check.hint


def test_an_agent_tells_its_own_reasons() -> None:
    assert set(healths(list(check_agent(WELL))).values()) == {Health.WELL}
    found = list(check_agent(WELL | {"reasons": ["not restored"], "storeInTouch": False}))
    assert healths(found) == {"agent": Health.FAILED, "store": Health.FAILED}
    assert found[0].text == "not restored"


def test_spaces_and_leaks() -> None:
    assert set(healths(list(check_spaces(WELL))).values()) == {Health.WELL}
    ill = WELL | {
        "spaces": [{"tenant": "blue", "faults": ["x is 0"]}],
        "leaks": ["device wp1 belongs to no attachment"],
    }
    assert [check.text for check in check_spaces(ill)] == ["tenant blue: x is 0", "device wp1 belongs to no attachment"]


def test_names_fail_when_netdns_is_away_and_are_passed_over_when_off() -> None:
    assert healths(list(check_names(WELL))) == {"names": Health.WELL}
    (check,) = check_names(WELL | {"names": "away"})
    assert (check.health, "--names-socket none" in check.hint) == (Health.FAILED, True)
    assert list(check_names(WELL | {"names": "off"})) == []


def test_a_socket_that_does_not_answer(tmp_path: Path) -> None:
    (check,) = check_cni(tmp_path / "none.sock", within=1)
    assert check.health is Health.FAILED


@pytest.mark.parametrize(
    ("passes", "health", "words"),
    [
        ({1500, 100}, Health.WELL, "packets of 1500 bytes reach 192.0.2.2 uncut"),
        ({100}, Health.FAILED, "small packets reach 192.0.2.2, those of 1500 bytes do not"),
        (set[int](), Health.WARNING, "does not answer"),
    ],
)
def test_full_packets_must_reach_every_peer(
    passes: set[int], health: Health, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/operating.md, `weft doctor`: the MTU of the path, checked at full size."""

    def answers(target: str, *, size: int, source: str, within: float) -> bool:
        assert (target, source) == ("192.0.2.2", "192.0.2.1")
        return size in passes

    monkeypatch.setattr(mtu_probe, "answers", answers)
    peer = {"node": "two", "vtepIp": "192.0.2.2", "state": "alive"}
    (check,) = check_peers(WELL | {"peers": [peer]}, within=1)
    assert (check.name, check.health) == ("peer two", health)
    assert words in check.text


def test_a_silent_peer_is_a_warning_and_tunnels_on_loopback_are_none() -> None:
    peer = {"node": "two", "vtepIp": "192.0.2.2", "state": "silent"}
    (check,) = check_peers(WELL | {"peers": [peer]}, within=1)
    assert check.health is Health.WARNING
    (check,) = check_peers(WELL | {"peers": [peer], "vtepIp": "127.0.0.1"}, within=1)
    assert (check.name, check.health) == ("tunnels", Health.FAILED)
