"""The checks of `weft doctor`; the lab tests them on real nodes."""

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
    check_dns,
    check_machine,
    check_networks,
    check_peers,
    check_switch,
    check_tenants,
)
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.drivers import datapath_tools
from weft.ports.datapath import CheckResult

HEALTHY: dict[str, Any] = {
    "node": "one",
    "ports": [],
    "reasons": [],
    "storeConnected": True,
    "appliedRevision": 7,
    "dns": "ok",
    "tenantNamespaces": [{"tenant": "default", "faults": []}],
    "inconsistencies": [],
    "vtepIp": "192.0.2.1",
    "mtu": 1450,
    "peers": [],
}


class Tools:
    """Datapath tools with given results."""

    def __init__(self, *, missing: list[str] | None = None, conflicts: list[str] | None = None) -> None:
        self._missing = missing
        self._conflicts = conflicts or []

    def probe(self) -> list[str]:
        if self._missing is None:
            raise DatapathFault("a new network namespace: Operation not permitted")
        return self._missing

    def find_conflicts(self) -> list[str]:
        return self._conflicts

    def check_switch(self, switch: Path) -> Iterator[CheckResult]:
        yield CheckResult(name="database", text=f"{switch} answers")
        yield CheckResult(name="daemon", text="not running", remedy="start it")
        yield CheckResult(name="bridge", text="foreign controller", remedy="check it", is_fatal=False)

    def enter_tenant_netns(self, directory: Path, tenant: TenantName) -> None:
        raise AssertionError

    def enter_host_side_netns(self, directory: Path, tenant: TenantName) -> None:
        raise AssertionError

    def enter_pod_netns(self, netns: Path) -> None:
        raise AssertionError

    def remove_netns_dir(self, directory: Path) -> None:
        raise AssertionError


def healths(checks: list[Check]) -> dict[str, Health]:
    return {check.name: check.health for check in checks}


def test_a_missing_kernel_feature_fails_and_a_firewall_warns() -> None:
    assert set(healths(list(check_machine(Tools(missing=[]))))) == {"kernel", "firewall"}
    found = list(check_machine(Tools(missing=["no vxlan"], conflicts=["FORWARD drops"])))
    assert healths(found) == {"kernel": Health.FAILED, "firewall": Health.WARNING}
    assert all(check.hint for check in found)


def test_results_of_the_switch_become_checks(tmp_path: Path) -> None:
    """Fatal results fail, others warn; a datapath without a switch has no check."""
    found = list(check_switch(Tools(), tmp_path))
    assert healths(found) == {"database": Health.OK, "daemon": Health.FAILED, "bridge": Health.WARNING}
    assert [check.hint for check in found] == ["", "start it", "check it"]
    assert list(check_switch(datapath_tools("linux"), tmp_path)) == []


def test_without_root_the_hint_says_so() -> None:
    (check,) = check_machine(Tools())
    assert (check.health, check.hint) == (Health.FAILED, "run weft doctor as root")


def test_an_incompatible_plugin_chain_is_reported_with_its_file(tmp_path: Path) -> None:
    """P-51, P-52."""
    (tmp_path / "87-podman.conflist").write_text('{"name": "p", "plugins": [{"type": "bridge"}, {"type": "portmap"}]}')
    (check,) = check_networks(tmp_path)
    assert (check.health, check.text) == (Health.OK, f"0 networks in {tmp_path} call our plugin")
    ours = tmp_path / "10-weft.conflist"
    ours.write_text('{"name": "w", "plugins": [{"type": "weft-cni"}, {"type": "portmap"}]}')
    (check,) = check_networks(tmp_path)
    assert (check.name, check.health) == ("networks", Health.FAILED)
    assert f"{ours} chains portmap" in check.text
    assert check.hint


def test_reasons_of_an_agent_that_is_not_ready_are_reported() -> None:
    assert set(healths(list(check_agent(HEALTHY))).values()) == {Health.OK}
    found = list(check_agent(HEALTHY | {"reasons": ["not restored"], "storeConnected": False}))
    assert healths(found) == {"agent": Health.FAILED, "store": Health.FAILED}
    assert found[0].text == "not restored"


def test_tenant_namespaces_and_inconsistencies() -> None:
    assert set(healths(list(check_tenants(HEALTHY))).values()) == {Health.OK}
    faulty = HEALTHY | {
        "tenantNamespaces": [{"tenant": "blue", "faults": ["x is 0"]}],
        "inconsistencies": ["device wp1 belongs to no attachment"],
    }
    assert [check.text for check in check_tenants(faulty)] == [
        "tenant blue: x is 0",
        "device wp1 belongs to no attachment",
    ]


def test_dns_fails_without_netdns_and_is_skipped_if_disabled() -> None:
    assert healths(list(check_dns(HEALTHY))) == {"dns": Health.OK}
    (check,) = check_dns(HEALTHY | {"dns": "unreachable"})
    assert (check.health, "--dns-socket none" in check.hint) == (Health.FAILED, True)
    assert list(check_dns(HEALTHY | {"dns": "disabled"})) == []


def test_a_socket_that_does_not_answer(tmp_path: Path) -> None:
    (check,) = check_cni(tmp_path / "none.sock", within=1)
    assert check.health is Health.FAILED


@pytest.mark.parametrize(
    ("passes", "health", "words"),
    [
        ({1500, 100}, Health.OK, "path MTU ok: packets of 1500 bytes reach 192.0.2.2"),
        ({100}, Health.FAILED, "packets of 1500 bytes do not reach 192.0.2.2"),
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
    peer = {"node": "two", "vtepIp": "192.0.2.2", "state": "reachable"}
    (check,) = check_peers(HEALTHY | {"peers": [peer]}, within=1)
    assert (check.name, check.health) == ("peer two", health)
    assert words in check.text


def test_an_unreachable_peer_is_a_warning_and_a_loopback_tunnel_fails() -> None:
    peer = {"node": "two", "vtepIp": "192.0.2.2", "state": "unreachable"}
    (check,) = check_peers(HEALTHY | {"peers": [peer]}, within=1)
    assert check.health is Health.WARNING
    (check,) = check_peers(HEALTHY | {"peers": [peer], "vtepIp": "127.0.0.1"}, within=1)
    assert (check.name, check.health) == ("tunnels", Health.FAILED)
