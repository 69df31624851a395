"""netplugin's flags and variables (contiv 1.2, 1.3), their defaults, and invalid values."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from weft import __version__
from weft.agent import settings as module
from weft.agent.settings import AgentSettings, read_agent_settings
from weft.domain.addresses import Address, parse_address, parse_subnet_v4
from weft.drivers import EtcdStoreSettings, RemoteStoreSettings
from weft.lab.waiting import DEADLINE
from weft.runtime.settings import BadSettings

OWN = Address(4, 0x0A090807)


@pytest.fixture(autouse=True)
def own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that the machine would detect."""
    monkeypatch.setattr(module, "default_address", lambda: OWN)


def read(*flags: str, **environ: str) -> AgentSettings:
    return read_agent_settings(flags, {f"CONTIV_NETPLUGIN_{name}": text for name, text in environ.items()})


def faults(*flags: str, **environ: str) -> tuple[str, ...]:
    with pytest.raises(BadSettings) as caught:
        read(*flags, **environ)
    return caught.value.faults


def address(text: str) -> Address:
    return parse_address(text, field="address")


def test_one_machine_needs_no_flag() -> None:
    settings = read()
    assert (settings.mode, settings.datapath, settings.vxlan_port) == ("cni", "linux", 4789)
    assert settings.host == socket.gethostname()
    assert settings.ctrl_ip == settings.vtep_ip == OWN
    assert settings.store == RemoteStoreSettings(endpoints=("unix:/var/lib/weft/store.sock",), node=settings.host)
    assert settings.cni_socket == Path("/run/weft/cni.sock")
    assert settings.contiv_socket is None
    assert settings.rest_address == ("127.0.0.1", 9090)
    assert (settings.run_dir, settings.data_dir) == (Path("/run/weft"), Path("/var/lib/weft"))
    assert (settings.log_level, settings.json_log, settings.syslog) == ("INFO", False, None)


@pytest.mark.parametrize(
    ("flags", "env", "text", "attribute", "value"),
    [
        (("--mode", "--plugin-mode", "--cluster-mode"), "MODE", "kubernetes", "mode", "kubernetes"),
        (("--mode",), "MODE", "docker", "mode", "docker"),
        (("--mode",), "MODE", "swarm-mode", "mode", "swarm-mode"),
        (("--mode",), "MODE", "test", "mode", "test"),
        (("--netmode", "--network-mode"), "NET_MODE", "vxlan", "vxlan_port", 4789),
        (("--fwdmode", "--forward-mode"), "FORWARD_MODE", "bridge", "mode", "cni"),
        (
            ("--etcd-endpoints", "--etcd"), "ETCD_ENDPOINTS", "http://127.0.0.1:2379,https://127.0.0.2:2379", "store",
            EtcdStoreSettings(endpoints=("http://127.0.0.1:2379", "https://127.0.0.2:2379")),
        ),
        (
            ("--cluster-store",), "CLUSTER_STORE", "etcd://127.0.0.1:2379", "store",
            EtcdStoreSettings(endpoints=("http://127.0.0.1:2379",)),
        ),
        (("--log-level",), "LOG_LEVEL", "DEBUG", "log_level", "DEBUG"),
        (("--host", "--host-label"), "HOST", "node-7.example", "host", "node-7.example"),
        (("--vtep-ip",), "VTEP_IP", "192.0.2.7", "vtep_ip", address("192.0.2.7")),
        (("--vtep-ip",), "VTEP_IP", "2001:db8::7", "vtep_ip", address("2001:db8::7")),
        (("--ctrl-ip",), "CONTROL_IP", "192.0.2.8", "ctrl_ip", address("192.0.2.8")),
        (("--vlan-uplinks", "--vlan-if"), "VLAN_UPLINKS", "eth1,eth2", "mode", "cni"),
        (("--vxlan-port",), "VXLAN_PORT", "8472", "vxlan_port", 8472),
        (("--nat-exclude",), "NAT_EXCLUDE", "10.0.0.0/8", "nat_exclude", (parse_subnet_v4("10.0.0.0/8"),)),
        (("--nodeport-addresses",), "NODEPORT_ADDRESSES", "10.0.0.0/8", "node_port_subnets",
         (parse_subnet_v4("10.0.0.0/8"),)),
        (("--datapath",), "DATAPATH", "linux", "datapath", "linux"),
        (("--datapath",), "DATAPATH", "ovs", "datapath", "ovs"),
        (("--ovs-dir",), "OVS_DIR", "/srv/ovs", "ovs_dir", Path("/srv/ovs")),
        (("--cni-socket",), "CNI_SOCKET", "/run/x.sock", "cni_socket", Path("/run/x.sock")),
        (("--contiv-socket",), "CONTIV_SOCKET", "/run/y.sock", "contiv_socket", Path("/run/y.sock")),
        (("--rest-address",), "REST_ADDRESS", "[::1]:1", "rest_address", ("::1", 1)),
        (("--rest-address",), "REST_ADDRESS", "none", "rest_address", None),
        (("--dns-socket",), "DNS_SOCKET", "/run/z.sock", "dns_socket", Path("/run/z.sock")),
        (("--dns-socket",), "DNS_SOCKET", "none", "dns_socket", None),
        (("--run-dir",), "RUN_DIR", "/srv/run", "dns_socket", Path("/srv/run/dns.sock")),
        (("--run-dir",), "RUN_DIR", "/srv/run", "run_dir", Path("/srv/run")),
        (("--data-dir",), "DATA_DIR", "/srv/data", "data_dir", Path("/srv/data")),
        (("--node-ttl",), "NODE_TTL", "1.5", "node_ttl", 1.5),
        (("--offline-limit",), "OFFLINE_LIMIT", "60", "offline_limit", 60.0),
        (("--stale-after",), "STALE_AFTER", "3", "stale_after", 3.0),
    ],
)  # fmt: skip
def test_each_setting_has_its_flags_and_its_variable(
    flags: tuple[str, ...], env: str, text: str, attribute: str, value: object
) -> None:
    for flag in flags:
        assert getattr(read(flag, text), attribute) == value
        assert getattr(read(f"{flag}={text}"), attribute) == value
    assert getattr(read(**{env: text}), attribute) == value


@pytest.mark.parametrize("flag", ["--use-json-log", "--json-log"])
def test_json_logs(flag: str) -> None:
    assert read(flag).json_log
    assert read(USE_JSON_LOG="true").json_log


@pytest.mark.parametrize("flag", ["--use-syslog", "--syslog"])
def test_syslog(flag: str) -> None:
    assert read(flag).syslog == ("udp", "127.0.0.1", 514)
    assert read(flag, "--syslog-url", "tcp://127.0.0.1:601").syslog == ("tcp", "127.0.0.1", 601)


def test_a_flag_wins_over_its_variable() -> None:
    assert read("--vxlan-port", "1", VXLAN_PORT="2").vxlan_port == 1


def test_no_address_is_detected_when_both_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Address:
        raise AssertionError

    monkeypatch.setattr(module, "default_address", refuse)
    settings = read("--ctrl-ip", "192.0.2.1", "--vtep-ip", "192.0.2.2")
    assert (settings.ctrl_ip, settings.vtep_ip) == (address("192.0.2.1"), address("192.0.2.2"))


def test_contivs_socket_is_served_in_mode_kubernetes() -> None:
    """contiv 1.7, 8.2."""
    assert read("--mode", "kubernetes").contiv_socket == Path("/run/contiv/contiv-cni.sock")
    assert read("--mode", "kubernetes", "--contiv-socket", "none").contiv_socket is None


def test_a_node_enrolls_in_a_cluster_without_etcd() -> None:
    """With etcd the token is ignored, so that one manifest is good for both."""
    own = ("--mode=kubernetes", "--join-token=/token")
    assert read(*own).join_token == Path("/token")
    assert read(*own, "--etcd-endpoints=http://127.0.0.1:2379").join_token is None
    assert faults("--join-token=/token") == (
        "--join-token needs --mode kubernetes: netmaster is discovered through Kubernetes",
    )


def test_the_masters_may_be_several(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text("x")
    files = [f"--tls-{name}={tmp_path / name}" for name in ("ca", "cert", "key")]
    assert read("--host", "n1", "--netmaster", "https://m1:9998,https://[::1]:9998", *files).store == (
        RemoteStoreSettings(
            endpoints=("https://m1:9998", "https://[::1]:9998"),
            node="n1",
            ca=str(tmp_path / "ca"),
            cert=str(tmp_path / "cert"),
            key=str(tmp_path / "key"),
        )
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mode", "mesos"], "--mode"),
        (["--netmode", "gre"], "vlan, vxlan"),
        (["--netmode", "vlan", "--vlan-uplinks", "eth1"], "carries no VLAN tags"),
        (["--netmode", "vlan"], "--vlan-uplinks is required"),
        (["--vlan-uplinks", "eth1,,eth2"], "empty item"),
        (["--fwdmode", "magic"], "bridge, routing"),
        (["--etcd", "127.0.0.1:2379"], "URL"),
        (["--consul", "http://127.0.0.1:8500"], "not available yet"),
        (["--consul", "http://a:8500", "--etcd", "http://a:2379"], "exclude each other"),
        (["--cluster-store", "zookeeper://127.0.0.1:1"], "--etcd-endpoints"),
        (["--log-level", "LOUD"], "DEBUG"),
        (["--syslog-url", "127.0.0.1:514"], "syslog"),
        (["--host", "no_name"], "--host"),
        (["--host", "../x"], "--host"),
        (["--vtep-ip", "192.0.2"], "--vtep-ip"),
        (["--ctrl-ip", "localhost"], "--ctrl-ip"),
        (["--vxlan-port", "0"], "65535"),
        (["--vxlan-port", "x"], "--vxlan-port"),
        (["--datapath", "magic"], "linux"),
        (["--netmaster", "http://m1:9999"], "https://HOST:PORT"),
        (["--netmaster", "unix:store.sock"], "unix:/PATH"),
        (["--netmaster", "https://m1"], "host:port"),
        (["--rest-address", "0.0.0.0:9090"], "not on loopback"),
        (["--rest-address", "192.0.2.1:9090"], "not on loopback"),
        (["--rest-address", "node1:9090"], "not on loopback"),
        (["--rest-address", "127.0.0.1"], "host:port"),
        (["--tls-cert", "/none"], "/none"),
        (["--node-ttl", "0"], "positive"),
        (["--offline-limit", "soon"], "positive"),
        (["--colour", "red"], "--colour"),
        (["--vtep", "192.0.2.1"], "--vtep"),
        (["netplugin"], "netplugin"),
        (["--mode"], "--mode"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_settings_are_refused(flags: list[str], words: str) -> None:
    assert any(words in fault for fault in faults(*flags))


def test_every_fault_is_reported_at_once() -> None:
    found = faults("--mode", "x", "--vtep-ip", "y", NODE_TTL="z")
    assert [fault.partition(":")[0] for fault in found] == ["--mode", "--vtep-ip", "CONTIV_NETPLUGIN_NODE_TTL"]
    assert len(faults("--netmode", "vlan")) == 2


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft.agent.main", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE, check=False, env={**os.environ, "COLUMNS": "200"}
    )


def test_the_program_ends_with_22_and_names_every_fault() -> None:
    """contiv 1.2: any invalid option, exit code 22."""
    done = run("--netmode", "vlan")
    assert done.returncode == 22
    assert done.stderr.splitlines() == [
        "netplugin: --vlan-uplinks is required with --netmode vlan",
        "netplugin: --netmode vlan: the linux datapath carries no VLAN tags; use vxlan",
        "netplugin: see netplugin --help",
    ]


def test_version_and_help() -> None:
    assert run("--version").stdout == f"netplugin {__version__}\n"
    shown = run("--help")
    assert shown.returncode == 0
    assert all(flag in shown.stdout for flag in ("--vtep-ip", "--rest-address", "--contiv-socket", "--vlan-uplinks"))
