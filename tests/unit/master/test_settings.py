"""netmaster's flags and variables (contiv 1.2, 1.4), their defaults, and their validation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from weft.drivers import EtcdStoreSettings, SqliteStoreSettings
from weft.lab.servers.masters import client, running_master
from weft.lab.servers.processes import free_port
from weft.lab.waiting import DEADLINE
from weft.master.settings import MasterSettings, read_master_settings
from weft.runtime.settings import BadSettings


def read(*flags: str, **environ: str) -> MasterSettings:
    return read_master_settings(flags, {f"CONTIV_NETMASTER_{name}": text for name, text in environ.items()})


def faults(*flags: str, **environ: str) -> tuple[str, ...]:
    with pytest.raises(BadSettings) as caught:
        read(*flags, **environ)
    return caught.value.faults


@pytest.fixture
def secured(tmp_path: Path) -> list[str]:
    """The flags that a listener needs which others can reach."""
    for name, text in (("cert", "x"), ("key", "x"), ("token", "a-token-of-24-characters\n")):
        (tmp_path / name).write_text(text)
    files = {"--tls-cert": "cert", "--tls-key": "key", "--token-file": "token"}
    return [part for flag, name in files.items() for part in (flag, str(tmp_path / name))]


def test_one_machine_needs_no_flag() -> None:
    settings = read()
    assert (settings.mode, settings.netmode, settings.fwdmode) == ("cni", "vxlan", "routing")
    assert settings.store == SqliteStoreSettings(path="/var/lib/weft/weft.db")
    assert settings.store_socket == Path("/var/lib/weft/store.sock")
    assert settings.external == settings.internal == ("127.0.0.1", 9999)
    assert settings.listeners == (("127.0.0.1", 9999),)
    assert settings.own_address == "127.0.0.1:9999"
    assert settings.plugin_name == "netplugin"
    assert settings.default_subnet == "10.224.0.0/16"
    assert (settings.log_level, settings.json_log, settings.syslog) == ("INFO", False, None)
    assert (settings.token, settings.tls_cert, settings.store_address) == ("", None, None)


@pytest.mark.parametrize(
    ("flags", "env", "text", "attribute", "value"),
    [
        (("--mode", "--plugin-mode", "--cluster-mode"), "MODE", "kubernetes", "mode", "kubernetes"),
        (("--mode",), "MODE", "docker", "mode", "docker"),
        (("--mode",), "MODE", "swarm-mode", "mode", "swarm-mode"),
        (("--mode",), "MODE", "test", "mode", "test"),
        (("--netmode", "--network-mode"), "NET_MODE", "vlan", "netmode", "vlan"),
        (("--fwdmode", "--forward-mode"), "FORWARD_MODE", "bridge", "fwdmode", "bridge"),
        (
            ("--etcd-endpoints", "--etcd"), "ETCD_ENDPOINTS", "http://127.0.0.1:2379,https://127.0.0.2:2379", "store",
            EtcdStoreSettings(endpoints=("http://127.0.0.1:2379", "https://127.0.0.2:2379")),
        ),
        (
            ("--cluster-store",), "CLUSTER_STORE", "etcd://127.0.0.1:2379,127.0.0.2:2379", "store",
            EtcdStoreSettings(endpoints=("http://127.0.0.1:2379", "http://127.0.0.2:2379")),
        ),
        (("--log-level",), "LOG_LEVEL", "WARN", "log_level", "WARN"),
        (("--external-address", "--listen-url"), "EXTERNAL_ADDRESS", "127.0.0.1:8", "external", ("127.0.0.1", 8)),
        (("--external-address",), "EXTERNAL_ADDRESS", "[::1]:65535", "own_address", "[::1]:65535"),
        (("--internal-address", "--control-url"), "INTERNAL_ADDRESS", "localhost:1", "internal", ("localhost", 1)),
        (("--infra", "--infra-type"), "INFRA", "default", "mode", "cni"),
        (("--name", "--plugin-name"), "PLUGIN_NAME", "contiv", "plugin_name", "contiv"),
        (("--data-dir",), "DATA_DIR", "/srv/weft", "data_dir", Path("/srv/weft")),
        (("--data-dir",), "DATA_DIR", "/srv/weft", "store", SqliteStoreSettings(path="/srv/weft/weft.db")),
        (("--default-subnet",), "DEFAULT_SUBNET", "10.7.0.9/24", "default_subnet", "10.7.0.0/24"),
        (("--default-subnet",), "DEFAULT_SUBNET", "none", "default_subnet", ""),
        (("--store-socket",), "STORE_SOCKET", "/run/weft.sock", "store_socket", Path("/run/weft.sock")),
        (("--leader-ttl",), "LEADER_TTL", "2.5", "leader_ttl", 2.5),
        (("--offline-limit",), "OFFLINE_LIMIT", "600", "offline_limit", 600.0),
    ],
)  # fmt: skip
def test_each_setting_has_its_flags_and_its_variable(
    flags: tuple[str, ...], env: str, text: str, attribute: str, value: object
) -> None:
    for flag in flags:
        assert getattr(read("--single-machine", flag, text), attribute) == value
        assert getattr(read("--single-machine", f"{flag}={text}"), attribute) == value
    assert getattr(read(SINGLE_MACHINE="true", **{env: text}), attribute) == value


@pytest.mark.parametrize("flag", ["--use-json-log", "--json-log"])
def test_json_logs(flag: str) -> None:
    assert read(flag).json_log
    assert read(USE_JSON_LOG="true").json_log
    assert not read(USE_JSON_LOG="0").json_log


@pytest.mark.parametrize("flag", ["--use-syslog", "--syslog"])
def test_syslog(flag: str) -> None:
    assert read(flag).syslog == ("udp", "127.0.0.1", 514)
    assert read(flag, "--syslog-url", "tcp://127.0.0.1:601").syslog == ("tcp", "127.0.0.1", 601)
    assert read(USE_SYSLOG="yes", SYSLOG_URL="udp://127.0.0.1:515").syslog == ("udp", "127.0.0.1", 515)
    assert read("--syslog-url", "tcp://127.0.0.1:601").syslog is None


def test_a_flag_wins_over_its_variable() -> None:
    assert read("--netmode", "vlan", NET_MODE="vxlan").netmode == "vlan"
    assert read(NET_MODE="vlan").netmode == "vlan"


def test_vxlan_with_bridge_is_allowed() -> None:
    """contiv 1.2: Contiv refused it at the start, though its datapath had it."""
    settings = read("--netmode", "vxlan", "--fwdmode", "bridge")
    assert (settings.netmode, settings.fwdmode) == ("vxlan", "bridge")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mode", "mesos"], "--mode"),
        (["--mode", "Docker"], "--mode"),
        (["--netmode", "gre"], "vlan, vxlan"),
        (["--fwdmode", ""], "bridge, routing"),
        (["--etcd", "127.0.0.1:2379"], "URL"),
        (["--etcd", "http://a,,http://b"], "empty"),
        (["--cluster-store", "zookeeper://127.0.0.1:1"], "--etcd-endpoints"),
        (["--cluster-store", "etcd://"], "--etcd-endpoints"),
        (["--cluster-store", "etcd://a:1,,b:2"], "--cluster-store"),
        (["--log-level", "LOUD"], "DEBUG"),
        (["--syslog-url", "127.0.0.1:514"], "syslog"),
        (["--syslog-url", "udp://127.0.0.1:x"], "--syslog-url"),
        (["--external-address", "9999"], "host:port"),
        (["--external-address", ":9999"], "host:port"),
        (["--external-address", "127.0.0.1:0"], "65535"),
        (["--external-address", "127.0.0.1:65536"], "65535"),
        (["--internal-address", "127.0.0.1:x"], "host:port"),
        (["--infra", "aci"], "--infra"),
        (["--default-subnet", "10.0.0.0"], "subnet"),
        (["--default-subnet", "10.0.0.0/31"], "--default-subnet"),
        (["--default-subnet", "10.0.0.1-10.0.0.1/24"], "--default-subnet"),
        (["--leader-ttl", "0"], "positive"),
        (["--leader-ttl", "nan"], "positive"),
        (["--offline-limit", "soon"], "positive"),
        (["--tls-cert", "/none"], "/none"),
        (["--etcd-user", "root"], "--etcd-password-file"),
        (["--colour", "red"], "--colour"),
        (["--net", "vlan"], "--net"),
        (["netmaster"], "netmaster"),
        (["--mode"], "--mode"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_settings_are_rejected(flags: list[str], words: str) -> None:
    assert any(words in fault for fault in faults(*flags))


def test_a_bad_variable_is_named() -> None:
    assert faults(NET_MODE="gre")[0].startswith("CONTIV_NETMASTER_NET_MODE")
    assert faults(USE_JSON_LOG="maybe")[0].startswith("CONTIV_NETMASTER_USE_JSON_LOG")


def test_all_faults_are_reported_at_once() -> None:
    found = faults("--mode", "x", "--netmode", "y", "--leader-ttl", "z", LOG_LEVEL="loud")
    assert [fault.partition(":")[0] for fault in found] == [
        "--mode",
        "--netmode",
        "CONTIV_NETMASTER_LOG_LEVEL",
        "--leader-ttl",
    ]


@pytest.mark.parametrize("flag", ["--consul-endpoints", "--consul"])
def test_consul_is_not_available_yet(flag: str) -> None:
    assert "not available yet" in faults(flag, "http://127.0.0.1:8500")[0]
    assert "not available yet" in faults("--cluster-store", "consul://127.0.0.1:8500")[0]
    assert "exclude" in faults(flag, "http://127.0.0.1:8500", "--etcd", "http://127.0.0.1:2379")[0]


@pytest.mark.parametrize(
    "flags",
    [
        ["--external-address", "0.0.0.0:9999", "--internal-address", "127.0.0.1:9999"],
        ["--external-address", "[::]:9999", "--internal-address", "127.0.0.1:9998"],
        ["--external-address", "192.0.2.1:9999"],
        ["--external-address", "node1:9999"],
        ["--internal-address", "192.0.2.1:9999"],
        ["--internal-address", "node1:9999"],
    ],
    ids=str,
)
def test_a_listener_beyond_loopback_needs_tls_and_a_token(flags: list[str], secured: list[str]) -> None:
    """W2: REST was open to everyone; here only this machine reaches it without them."""
    assert any("not loopback" in fault for fault in faults(*flags))
    for missing in (0, 2, 4):
        assert faults(*flags, *secured[:missing], *secured[missing + 2 :])
    assert read(*flags, *secured).token == "a-token-of-24-characters"


@pytest.mark.parametrize("address", ["127.0.0.1:9999", "127.8.8.8:9999", "[::1]:9999", "localhost:9999"])
def test_loopback_needs_nothing(address: str) -> None:
    assert read("--external-address", address).token == ""


@pytest.mark.parametrize("address", ["0.0.0.0:9999", "[::]:9999"])
def test_a_wildcard_is_not_an_internal_address(address: str, secured: list[str]) -> None:
    """Others would forward to themselves, and two masters would take each other for one."""
    assert any("--internal-address" in fault for fault in faults("--external-address", address, *secured))
    own = ["--external-address", address, "--internal-address", "192.0.2.7:9999"]
    assert read(*own, *secured).own_address == "192.0.2.7:9999"
    assert faults("--internal-address", address, *secured)


@pytest.mark.parametrize("content", [b"", b"short", b"with a\nnewline inside it", b"\xff" * 20, "ö".encode() * 20])
def test_a_bad_token_is_rejected(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    assert "--token-file" in faults("--token-file", str(file))[0]


def test_the_token_is_never_shown(secured: list[str]) -> None:
    assert "a-token-of-24-characters" not in repr(read(*secured))


def test_certificate_and_key_go_together(secured: list[str]) -> None:
    assert "go together" in faults(*secured[:2])[0]
    assert "--store-address" in faults("--store-address", "127.0.0.1:9998")[0]


@pytest.mark.parametrize(
    ("external", "internal", "listeners"),
    [
        ("127.0.0.1:9999", "", (("127.0.0.1", 9999),)),
        ("127.0.0.1:9999", "127.0.0.1:9999", (("127.0.0.1", 9999),)),
        ("127.0.0.1:9999", "127.0.0.1:9998", (("127.0.0.1", 9999), ("127.0.0.1", 9998))),
        ("0.0.0.0:9999", "192.0.2.7:9999", (("0.0.0.0", 9999),)),
        ("0.0.0.0:9999", "192.0.2.7:9998", (("0.0.0.0", 9999), ("192.0.2.7", 9998))),
    ],
)  # fmt: skip
def test_the_internal_address_has_its_own_listener_unless_it_is_covered(
    external: str, internal: str, listeners: tuple[tuple[str, int], ...], secured: list[str]
) -> None:
    flags = ["--external-address", external, *(["--internal-address", internal] if internal else [])]
    assert read(*flags, *secured).listeners == listeners


def test_enrollment_needs_an_address_that_can_be_published() -> None:
    own = ["--mode", "kubernetes", "--store-address", "192.0.2.7:9998"]
    assert read(*own, "--join-address", "[192.0.2.7]:9997").join_address == ("192.0.2.7", 9997)
    for flags, words in (
        (["--join-address", "192.0.2.7:9997"], "--mode kubernetes"),
        (["--mode", "kubernetes", "--join-address", "192.0.2.7:9997"], "--store-address must be an address"),
        ([*own, "--join-address", "0.0.0.0:9997"], "--join-address must be an address"),
        ([*own, "--join-address", "master:9997"], "'master' is a name"),
    ):
        with pytest.raises(BadSettings, match=words):
            read(*flags)


async def test_b5_the_api_answers_on_the_external_address() -> None:
    async with running_master() as rest:
        assert (await rest.send("GET", "/info")).accepted()["local-ip"] == rest.url.removeprefix("http://")


async def test_b6_the_api_answers_on_the_same_internal_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with running_master("--external-address", address, "--internal-address", address) as rest:
        assert (await rest.send("GET", "/info")).accepted()["leader-ip"] == address


async def test_b7_another_internal_address_answers_there_only() -> None:
    """B7: the control address answers, and its port is not open on other addresses."""
    control = f"127.0.0.2:{free_port()}"
    async with running_master("--internal-address", control) as rest, client(f"http://{control}") as inside:
        info = (await inside.send("GET", "/info")).accepted()
        assert info == (await rest.send("GET", "/info")).accepted()
        assert info["local-ip"] == info["leader-ip"] == control
        async with client(f"http://127.0.0.1:{control.rpartition(':')[2]}") as elsewhere:
            with pytest.raises(aiohttp.ClientConnectionError):
                await elsewhere.send("GET", "/info")


def run(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft.master.main", *flags],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )


def test_a_bad_setting_ends_the_program_with_22() -> None:
    done = run("--netmode", "gre", CONTIV_NETMASTER_MODE="mesos")
    assert done.returncode == 22
    assert "netmaster: --netmode: 'gre' is not one of vlan, vxlan" in done.stderr
    assert "CONTIV_NETMASTER_MODE" in done.stderr
    assert "--help" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "words"), [("--help", "--etcd"), ("-h", "--netmode"), ("--version", "netmaster"), ("-v", "netmaster")]
)
def test_help_and_version(flag: str, words: str) -> None:
    done = run(flag)
    assert done.returncode == 0
    assert words in done.stdout


def test_an_etcd_password_is_not_sent_over_plain_http(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret")
    user = ("--single-machine", "--etcd-user", "weft", "--etcd-password-file", str(password))
    assert any("clear text" in fault for fault in faults(*user, "--etcd-endpoints", "http://192.0.2.1:2379"))
    assert read(*user, "--etcd-endpoints", "https://192.0.2.1:2379").store
    assert read(*user, "--etcd-endpoints", "http://127.0.0.1:2379").store


def test_a_client_certificate_is_not_ignored_over_plain_http(tmp_path: Path) -> None:
    """The operator believes that the connection is authenticated; also on this machine, and for one URL of several."""
    file = tmp_path / "pem"
    file.write_text("any")
    given = ("--single-machine", "--etcd-cert", str(file), "--etcd-key", str(file), "--etcd-endpoints")
    for urls in ("http://127.0.0.1:2379", "https://192.0.2.1:2379,http://192.0.2.2:2379"):
        assert any("--etcd-cert" in fault and "https://" in fault for fault in faults(*given, urls))
    assert read(*given, "https://192.0.2.1:2379").store
