"""The parser of netctl: flags, short flags, aliases, defaults and usage errors (contiv 3)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from weft.ctl.failures import Usage
from weft.ctl.netctl.commands import COMMANDS, NOUNS
from weft.ctl.netctl.parser import Parsed, parse

LEAVES = [f"{noun.names[0]} {command.names[0]}" for noun in NOUNS for command in noun.commands]
LEAVES += [command.names[0] for command in COMMANDS]


def parsed(line: str, environment: Mapping[str, str] | None = None) -> Parsed:
    return parse(line.split(), environment=environment or {})


@pytest.mark.parametrize(
    ("line", "members"),
    [
        (
            "network create blue --subnet 10.1.1.0/24",
            {
                "tenantName": "default",
                "networkName": "blue",
                "subnet": "10.1.1.0/24",
            },
        ),
        (
            "net create -t t1 -n infra -e vlan -p 7 -s 10.1.1.0/24 -g 10.1.1.1 -s6 2001:db8::/64 -g6 2001:db8::1"
            " --tag nw blue",
            {
                "tenantName": "t1",
                "networkName": "blue",
                "nwType": "infra",
                "encap": "vlan",
                "pktTag": 7,
                "subnet": "10.1.1.0/24",
                "gateway": "10.1.1.1",
                "ipv6Subnet": "2001:db8::/64",
                "ipv6Gateway": "2001:db8::1",
                "cfgdTag": "nw",
            },
        ),
        (
            "group create -p a --policy=b -n prof -r 10.1.1.4-10.1.1.9 --epg-tag g blue web",
            {
                "tenantName": "default",
                "networkName": "blue",
                "groupName": "web",
                "policies": ["a", "b"],
                "netProfile": "prof",
                "ipPool": "10.1.1.4-10.1.1.9",
                "cfgdTag": "g",
            },
        ),
        (
            "netprofile create -b 10Mbps -d 46 -s 100 gold",
            {"tenantName": "default", "profileName": "gold", "bandwidth": "10Mbps", "DSCP": 46, "burst": 100},
        ),
        (
            "policy rule-add p 1",
            {
                "tenantName": "default",
                "policyName": "p",
                "ruleId": "1",
                "priority": 1,
                "direction": "in",
                "action": "allow",
            },
        ),
        (
            "policy rule-add -p 10 -d=in -g web -n blue -i 10.0.0.0/8 -s 10.1.1.1 -l tcp -P 80 -j deny p 1",
            {
                "tenantName": "default",
                "policyName": "p",
                "ruleId": "1",
                "priority": 10,
                "direction": "in",
                "fromEndpointGroup": "web",
                "fromNetwork": "blue",
                "fromIpAddress": "10.0.0.0/8",
                "toIpAddress": "10.1.1.1",
                "protocol": "tcp",
                "port": 80,
                "action": "deny",
            },
        ),
        ("global set -f default", {"networkInfraType": "default"}),
        (
            "global set -v 1-100 -x 1-200 -b bridge -a flood -s 172.20.0.0/16",
            {
                "vlans": "1-100",
                "vxlans": "1-200",
                "fwdMode": "bridge",
                "arpMode": "flood",
                "pvtSubnet": "172.20.0.0/16",
            },
        ),
        (
            "bgp create n1 --router-ip 50.1.1.1/24 --as 65002 --neighbor-as 500 --neighbor 50.1.1.2",
            {"hostname": "n1", "routerip": "50.1.1.1/24", "as": "65002", "neighbor-as": "500", "neighbor": "50.1.1.2"},
        ),
        (
            "service create -t t1 -s blue -l app=web -l tier=1 -p 80:8080:TCP --ip 10.1.1.9 shop",
            {
                "tenantName": "t1",
                "serviceName": "shop",
                "networkName": "blue",
                "selectors": ["app=web", "tier=1"],
                "ports": ["80:8080:TCP"],
                "ipAddress": "10.1.1.9",
            },
        ),
        ("ep inspect 7f3a", {"endpointID": "7f3a"}),
        ("tenant create t1", {"tenantName": "t1"}),
        ("backup", {}),
        ("restore -", {"file": "-"}),
    ],
)
def test_flags_and_arguments_become_json_members(line: str, members: Mapping[str, object]) -> None:
    assert dict(parsed(line).members) == members


def test_switches_have_short_flags() -> None:
    assert parsed("group ls -a -j -q").switches == {"all", "json", "quiet"}
    assert parsed("group list --all").switches == {"all"}
    assert parsed("restore --force x").switches == {"force"}


def test_every_noun_and_verb_of_the_original_is_there() -> None:
    """All 48 leaf commands but those of ACI and login, and ours: `endpoint ls`, `node ls`, backup and so on."""
    original = {
        "version",
        "endpoint inspect",
        *(f"group {verb}" for verb in ("create", "inspect", "rm", "ls")),
        *(f"netprofile {verb}" for verb in ("create", "rm", "ls", "inspect")),
        *(f"network {verb}" for verb in ("create", "rm", "ls", "inspect")),
        *(f"tenant {verb}" for verb in ("create", "rm", "inspect", "ls")),
        *(f"policy {verb}" for verb in ("create", "rm", "inspect", "ls", "rule-add", "rule-rm", "rule-ls")),
        *(f"global {verb}" for verb in ("info", "inspect", "set")),
        *(f"bgp {verb}" for verb in ("create", "rm", "ls", "inspect")),
        *(f"service {verb}" for verb in ("create", "rm", "ls", "inspect")),
    }
    assert len(original) == 36
    ours = {
        "endpoint ls",
        "node ls",
        "node wait",
        "policy diff",
        "backup",
        "restore",
        "completion",
        "purge-kubernetes",
    }
    assert set(LEAVES) == original | ours


def test_hidden_aliases_work_and_are_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("node settle").command is parsed("node wait").command
    with pytest.raises(SystemExit):
        parsed("node --help")
    assert "settle" not in capsys.readouterr().out


@pytest.mark.parametrize("line", LEAVES)
def test_every_command_has_help(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Building the parser is also the proof that no two flags of a command share a name."""
    with pytest.raises(SystemExit) as leaving:
        parsed(f"{line} --help")
    assert leaving.value.code == 0
    assert f"usage: netctl {line} " in capsys.readouterr().out


@pytest.mark.parametrize(("line", "words"), [("-h", ("network, net", "backup")), ("network --help", ("rm, delete",))])
def test_menus_list_the_next_words(line: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        parsed(line)
    assert leaving.value.code == 0
    menu = capsys.readouterr().out
    assert all(word in menu for word in (*words, "--netmaster URL"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "a command is missing"),
        ("network", "a verb is missing"),
        ("netwrok ls", "did you mean 'network'?"),
        ("network crate x", "did you mean 'create'?"),
        ("external-contracts ls", "not a command"),
        ("network create blue", "--subnet"),
        ("network create --subnet 10.1.1.0/24", "NETWORK"),
        ("network create blue --subnet", "expected one argument"),
        ("network create blue --subn 10.1.1.0/24", "--subn"),
        ("network create blue -s 10.1.1.0/24 -p many", "invalid int value"),
        ("network ls extra", "unrecognized arguments: extra"),
        ("bgp create n1 --router-ip 1.1.1.1/24", "--as, --neighbor-as, --neighbor"),
        ("service create shop", "--network/-s, --selector/-l, --port/-p"),
        ("completion tcsh", "invalid choice"),
        ("group create --external-contract x blue web", "--external-contract"),
        ("--bogus network ls", "--bogus"),
        ("--timeout 0 network ls", "out of range"),
        ("--timeout nan network ls", "out of range"),
        ("--timeout soon network ls", "not a number"),
    ],
)
def test_an_invalid_line_is_a_usage_error(line: str, reason: str) -> None:
    with pytest.raises(Usage) as failure:
        parsed(line)
    assert reason in failure.value.message
    assert failure.value.exit_code == 1


@pytest.mark.parametrize("words", [["tenant", "rm", ""], ["network", "ls", "-t", ""], ["backup", ""]])
def test_an_empty_name_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(Usage, match="must not be empty"):
        parse(words, environment={})


def test_connection_defaults() -> None:
    connection = parsed("network ls").connection
    assert connection == ("http://127.0.0.1:9999", False, "", 30.0)


def test_connection_from_the_environment() -> None:
    environment = {"NETMASTER": "https://m:1", "INSECURE": "true", "NETCTL_CACERT": "ca.pem"}
    assert parsed("network ls", environment).connection == ("https://m:1", True, "ca.pem", 30.0)


@pytest.mark.parametrize("off", ["", "0", "false", "no"])
def test_insecure_can_be_switched_off_in_the_environment(off: str) -> None:
    assert not parsed("network ls", {"INSECURE": off}).connection.insecure


@pytest.mark.parametrize(
    "line",
    [
        "--netmaster http://a:1 --timeout 5 --insecure --cacert x network ls",
        "network ls --netmaster http://a:1 --timeout 5 --insecure --cacert x",
        "--netmaster=http://a:1 --timeout=5 network ls --insecure --cacert=x",
    ],
)
def test_global_flags_stand_before_or_after_the_command_and_override_the_environment(line: str) -> None:
    environment = {"NETMASTER": "https://m:1", "NETCTL_CACERT": "y"}
    assert parsed(line, environment).connection == ("http://a:1", True, "x", 5.0)


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("tenant create t1", 0),
        ("tenant create --wait t1", 10),
        ("tenant create t1 --wait", 10),
        ("tenant create --wait=2.5 t1", 2.5),
        ("tenant create t1 --wait=60", 60),
    ],
)
def test_the_value_of_wait_follows_an_equals_sign(line: str, seconds: float) -> None:
    command_line = parsed(line)
    assert (command_line.seconds, command_line.members) == (seconds, {"tenantName": "t1"})


@pytest.mark.parametrize("wait", ["--wait=", "--wait=soon", "--wait=0", "--wait=-1", "--wait=61", "--wait=nan"])
def test_an_invalid_wait_is_a_usage_error(wait: str) -> None:
    with pytest.raises(Usage, match="--wait"):
        parsed(f"tenant create t1 {wait}")


def test_reading_commands_have_no_wait() -> None:
    with pytest.raises(Usage):
        parsed("network ls --wait")


def test_words_after_two_dashes_are_arguments() -> None:
    assert parsed("tenant create -- --wait").members == {"tenantName": "--wait"}
