"""The request that each command sends, and its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.ctl.conftest import Netctl, Stub

API = "/api/v1"
GUARDED = "report=1&refuse-opening=1"


def test_create_sends_what_is_given_and_prints_the_outcome(netctl: Netctl, stub: Stub) -> None:
    stub.answers(f"PATCH {API}/networks/t1:blue/?{GUARDED}", {"key": "t1:blue", "outcome": "created"})
    result = netctl("network", "create", "-t", "t1", "--subnet", "10.1.1.0/24", "blue")
    assert (result.code, result.out) == (0, "t1:blue created\n")
    assert stub.requests[0].headers["Content-Type"] == "application/json"
    assert stub.requests[0].json() == {
        "tenantName": "t1",
        "networkName": "blue",
        "subnet": "10.1.1.0/24",
    }


def test_UX1_a_refusal_to_open_traffic_has_its_own_exit_code(netctl: Netctl, stub: Stub) -> None:
    refusal = {"code": "opens-traffic", "message": "default:web exists, and this change would newly allow traffic: x"}
    stub.answers(f"PATCH {API}/endpointGroups/default:web/?{GUARDED}", refusal, status=409)
    result = netctl("group", "create", "--no-policy", "net", "web")
    assert (result.code, result.out) == (6, "")
    assert "--force" in result.err
    assert stub.requests[0].json() == {
        "tenantName": "default",
        "networkName": "net",
        "groupName": "web",
        "policies": None,
    }
    changes = [
        {"member": "policies", "before": ["old", "both"], "after": ["both", "new"]},
        {"member": "mode", "before": None, "after": "audit"},
    ]
    report = {"key": "default:web", "outcome": "changed", "changes": changes, "opens": ["tcp/22 from a to b"]}
    stub.answers(f"PATCH {API}/endpointGroups/default:web/?report=1", report)
    assert netctl("group", "create", "--no-policy", "--force", "net", "web").out == (
        "default:web changed: policies -old +new, mode none -> audit\nopens: tcp/22 from a to b\n"
    )


def test_UX1_a_flag_that_sets_and_one_that_clears_contradict(netctl: Netctl, stub: Stub) -> None:
    result = netctl("group", "create", "-p", "x", "--no-policy", "net", "web")
    assert (result.code, stub.requests) == (1, [])
    assert "--no-policy contradicts --policy" in result.err


@pytest.mark.parametrize("flag", ["--dry-run", "--preview"])
def test_UX2_a_dry_run_asks_netmaster_for_one(netctl: Netctl, stub: Stub, flag: str) -> None:
    stub.answers(f"PATCH {API}/policys/default:p/?dry-run=1", {"key": "default:p", "outcome": "created"})
    assert netctl("policy", "create", "p", flag, "--wait").out == (
        "default:p would be created\nno verdict would change\n"
    )


@pytest.mark.parametrize(
    ("line", "path", "key"),
    [
        ("tenant rm t1", "tenants/t1/", "t1"),
        ("tenant delete t1", "tenants/t1/", "t1"),
        ("net rm blue", "networks/default:blue/", "default:blue"),
        ("group rm -t t1 web", "endpointGroups/t1:web/", "t1:web"),
        ("policy rm p", "policys/default:p/", "default:p"),
        ("policy rule-rm p 1", "rules/default:p:1/", "default:p:1"),
        ("netprofile rm gold", "netprofiles/default:gold/", "default:gold"),
        ("service rm shop", "serviceLBs/default:shop/", "default:shop"),
        ("bgp rm n1", "Bgps/n1/", "n1"),
        ("tenant rm ../x", "tenants/..%2Fx/", "../x"),
        ("tenant rm ä?#%", "tenants/%C3%A4%3F%23%25/", "ä?#%"),
    ],
)
def test_rm_deletes(netctl: Netctl, stub: Stub, line: str, path: str, key: str) -> None:
    stub.answers(f"DELETE {API}/{path}?report=1", {"key": key, "outcome": "deleted"})
    result = netctl(*line.split())
    assert (result.code, result.out, result.err) == (0, f"{key} deleted\n", "")


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("tenant inspect t1", "tenants/t1/"),
        ("network inspect blue", "networks/default:blue/"),
        ("group inspect web", "endpointGroups/default:web/"),
        ("policy inspect p", "policys/default:p/"),
        ("netprofile inspect gold", "netprofiles/default:gold/"),
        ("service inspect shop", "serviceLBs/default:shop/"),
        ("bgp inspect n1", "Bgps/n1/"),
        ("global inspect", "globals/global/"),
        ("endpoint inspect 7f3a", "endpoints/7f3a/"),
        ("ep inspect 7f3a", "endpoints/7f3a/"),
    ],
)
def test_inspect_prints_indented_json(netctl: Netctl, stub: Stub, line: str, path: str) -> None:
    shown = {"Config": {"key": "x"}, "Oper": {"numEndpoints": 2}}
    stub.answers(f"GET {API}/inspect/{path}", shown)
    result = netctl(*line.split())
    assert result.code == 0
    assert result.out == json.dumps(shown, indent=2) + "\n"


LISTS: list[tuple[str, str, dict[str, object], str, str]] = [
    (
        "group ls",
        "endpointGroups",
        {"tenantName": "default", "groupName": "web", "networkName": "blue", "policies": ["p1", "p2"]},
        "web",
        "Tenant   Group  Network  IP Pool  CfgdTag  Policies  Network profile\n"
        "------   -----  -------  -------  -------  --------  ---------------\n"
        "default  web    blue                       p1,p2\n",
    ),
    (
        "network ls",
        "networks",
        {"tenantName": "default", "networkName": "blue", "nwType": "data", "encap": "vxlan", "subnet": "10.1.1.0/24"},
        "blue",
        "Tenant   Network  Nw Type  Encap type  Packet tag  Subnet       Gateway  IPv6Subnet  IPv6Gateway  Cfgd Tag\n"
        "------   -------  -------  ----------  ----------  ------       -------  ----------  -----------  --------\n"
        "default  blue     data     vxlan       0           10.1.1.0/24\n",
    ),
    (
        "netprofile ls",
        "netprofiles",
        {"tenantName": "default", "profileName": "gold", "bandwidth": "10Mbps", "DSCP": 46},
        "gold",
        "Name  Tenant   Bandwidth  DSCP  burst size\n"
        "----  ------   ---------  ----  ----------\n"
        "gold  default  10Mbps     46    0\n",
    ),
    (
        "policy ls",
        "policys",
        {"tenantName": "default", "policyName": "p", "mode": "audit"},
        "p",
        "Tenant   Policy  Mode\n------   ------  ----\ndefault  p       audit\n",
    ),
    (
        "service ls",
        "serviceLBs",
        {
            "tenantName": "default",
            "serviceName": "shop",
            "networkName": "blue",
            "ipv6Address": "fd00::9",
            "ports": ["80:8080:TCP"],
            "selectors": ["app=web"],
        },
        "shop",
        "Service  Tenant   Network  Preferred IP  Preferred IPv6  Ports        Selectors\n"
        "-------  ------   -------  ------------  --------------  -----        ---------\n"
        "shop     default  blue                   fd00::9         80:8080:TCP  app=web\n",
    ),
    (
        "endpoint ls",
        "endpoints",
        {"tenantName": "default", "networkName": "blue", "endpointID": "e1", "ipAddress": "10.1.1.2"},
        "e1",
        "Tenant   Network  Group  Endpoint  IP address  IPv6 address  MAC address  Host  Container\n"
        "------   -------  -----  --------  ----------  ------------  -----------  ----  ---------\n"
        "default  blue            e1        10.1.1.2\n",
    ),
]
CLUSTER_LISTS: list[tuple[str, str, dict[str, object], str, str]] = [
    ("tenant ls", "tenants", {"tenantName": "default"}, "default", "Name\n----\ndefault\n"),
    (
        "node ls",
        "nodes",
        {
            "name": "n1",
            "ctrlIp": "192.0.2.1",
            "vtepIp": "192.0.2.1",
            "vxlanPort": 4789,
            "version": "0.1.0",
            "status": {"state": "Ready", "appliedRevision": 17, "lag": 3, "reasons": []},
        },
        "n1",
        "Node  Control address  Tunnel address  Version  Applied rev  Lag  State\n"
        "----  ---------------  --------------  -------  -----------  ---  -----\n"
        "n1    192.0.2.1        192.0.2.1       0.1.0    17           3    Ready\n",
    ),
    (
        "bgp ls",
        "Bgps",
        {"hostname": "n1", "routerip": "50.1.1.1/24", "as": "65002", "neighbor-as": "500", "neighbor": "50.1.1.2"},
        "n1",
        "HostName  Router IP    AS     Neighbor AS  Neighbor\n"
        "--------  ---------    --     -----------  --------\n"
        "n1        50.1.1.1/24  65002  500          50.1.1.2\n",
    ),
]


@pytest.mark.parametrize(("line", "plural", "row", "name", "table"), LISTS + CLUSTER_LISTS)
def test_ls_prints_a_table_or_names_or_json(
    netctl: Netctl, stub: Stub, line: str, plural: str, row: dict[str, object], name: str, table: str
) -> None:
    """The columns of contiv 3; `bgp ls -q` works too (W25)."""
    query = "?limit=1000" if line in ("tenant ls", "node ls", "bgp ls") else "?tenantName=default&limit=1000"
    stub.answers(f"GET {API}/{plural}/{query}", [row])
    assert netctl(*line.split()).out == table
    assert netctl(*line.split(), "-q").out == f"{name}\n"
    assert json.loads(netctl(*line.split(), "--json").out) == [row]


@pytest.mark.parametrize(("line", "plural", "row", "name", "table"), LISTS)
def test_ls_all_asks_for_every_tenant(
    netctl: Netctl, stub: Stub, line: str, plural: str, row: dict[str, object], name: str, table: str
) -> None:
    stub.answers(f"GET {API}/{plural}/?limit=1000", [row])
    assert netctl(*line.split(), "--all").out == table


def test_a_long_list_comes_in_pages(netctl: Netctl, stub: Stub) -> None:
    first = f"GET {API}/tenants/?limit=1000"
    stub.answers(first, [{"tenantName": "a"}], headers={"X-Continue": "b/c="})
    stub.answers(f"{first}&continue=b%2Fc%3D", [{"tenantName": "b"}])
    assert netctl("tenant", "ls", "-q").out == "a\nb\n"


def test_an_empty_list_of_a_tenant_that_exists_is_an_empty_table(netctl: Netctl, stub: Stub) -> None:
    stub.answers(f"GET {API}/policys/?tenantName=t1&limit=1000", [])
    stub.answers(f"GET {API}/tenants/t1/", {"tenantName": "t1"})
    result = netctl("policy", "ls", "-t", "t1")
    assert (result.code, result.lines[2:]) == (0, [])


def test_a_list_of_an_unknown_tenant_is_an_error(netctl: Netctl, stub: Stub) -> None:
    stub.answers(f"GET {API}/policys/?tenantName=t1&limit=1000", [])
    result = netctl("policy", "ls", "-t", "t1")
    assert (result.code, result.out) == (3, "")
    assert "t1" in result.err


RULES = [
    {"ruleId": "1", "direction": "in", "priority": 10, "fromEndpointGroup": "web", "protocol": "tcp", "action": "deny"},
    {
        "ruleId": "2",
        "direction": "out",
        "priority": 1,
        "toNetwork": "blue",
        "protocol": "udp",
        "port": 53,
        "action": "allow",
    },
    {"ruleId": "3", "direction": "in", "priority": 1, "action": "allow"},
]
RULES_LINE = f"GET {API}/rules/?tenantName=default&policyName=p&limit=1000"


def test_rule_ls_prints_incoming_and_outgoing_rules_by_priority(netctl: Netctl, stub: Stub) -> None:
    stub.answers(RULES_LINE, RULES)
    assert netctl("policy", "rule-ls", "p").out == (
        "Incoming Rules:\n"
        "Rule  Priority  From Group  From Network  From Address  To Address  Protocol  Port  Action\n"
        "----  --------  ----------  ------------  ------------  ----------  --------  ----  ------\n"
        "3     1                                                                       0     allow\n"
        "1     10        web                                                 tcp       0     deny\n"
        "Outgoing Rules:\n"
        "Rule  Priority  To Group  To Network  To Address  Protocol  Port  Action\n"
        "----  --------  --------  ----------  ----------  --------  ----  ------\n"
        "2     1                   blue                    udp       53    allow\n"
    )
    assert netctl("policy", "rule-ls", "-q", "p").out == "2\n3\n1\n"
    assert len(json.loads(netctl("policy", "rule-ls", "-j", "p").out)) == 3


def test_rule_ls_of_an_unknown_policy_is_an_error(netctl: Netctl, stub: Stub) -> None:
    stub.answers(RULES_LINE, [])
    assert netctl("policy", "rule-ls", "p").code == 3
    stub.answers(f"GET {API}/policys/default:p/", {"policyName": "p"})
    assert netctl("policy", "rule-ls", "-q", "p").code == 0


@pytest.mark.parametrize(
    ("direction", "flag"),
    [
        ("in", "--to-group"),
        ("in", "--to-network"),
        ("out", "--from-group"),
        ("out", "--from-network"),
        ("out", "--from-ip-address"),
    ],
)
def test_rule_add_rejects_flags_that_do_not_apply_to_the_direction(
    netctl: Netctl, stub: Stub, direction: str, flag: str
) -> None:
    """O13: rejected before anything is sent."""
    result = netctl("policy", "rule-add", "p", "1", "-d", direction, flag, "x")
    assert result.code == 1
    assert flag in result.err
    assert not stub.requests


def test_rule_add_leaves_other_validation_to_netmaster(netctl: Netctl, stub: Stub) -> None:
    stub.answers(f"POST {API}/rules/default:p:1/?report=1", {})
    assert netctl("policy", "rule-add", "p", "1", "-d", "in", "-s", "10.1.1.1", "-g", "web").code == 0
    assert netctl("policy", "rule-add", "p", "1", "-d", "sideways", "-e", "web").code == 0


GLOBAL = {
    "key": "global",
    "name": "global",
    "networkInfraType": "default",
    "vlans": "1-4094",
    "vxlans": "1-10000",
    "arpMode": "proxy",
    "pvtSubnet": "172.21.0.0/16",
    "links": {},
    "link-sets": {},
}


def test_global_info(netctl: Netctl, stub: Stub) -> None:
    stub.answers(f"GET {API}/globals/global/", GLOBAL)
    assert netctl("global", "info").out == (
        "Fabric mode:    default\n"
        "Forward mode:\n"
        "ARP mode:       proxy\n"
        "VLAN range:     1-4094\n"
        "VXLAN range:    1-10000\n"
        "Private subnet: 172.21.0.0/16\n"
    )
    assert json.loads(netctl("global", "info", "--json", "-t", "x", "-a").out) == GLOBAL


def test_global_set_changes_only_the_given_settings(netctl: Netctl, stub: Stub) -> None:
    """W25: the original always sent a private subnet, and so changed it back to its default."""
    stub.answers(f"PATCH {API}/globals/global/?report=1", {"key": "global", "outcome": "changed"})
    assert netctl("global", "set", "--vlan-range", "1-100").code == 0
    assert stub.requests[-1].json() == {"vlans": "1-100"}


def test_global_set_without_settings_is_a_usage_error(netctl: Netctl, stub: Stub) -> None:
    """W25."""
    result = netctl("global", "set")
    assert result.code == 1
    assert not stub.requests


def test_version_prints_client_and_server(netctl: Netctl, stub: Stub) -> None:
    stub.answers("GET /version", {"Version": "9.9", "GitCommit": "abc", "BuildTime": "today"})
    result = netctl("version")
    assert result.out.startswith("Client version: ")
    assert "Server version: 9.9\nServer commit:  abc\nServer built:   today\n" in result.out


def test_the_clients_own_version_needs_no_netmaster(netctl: Netctl, stub: Stub) -> None:
    result = netctl("--version")
    assert (result.code, result.lines[0][:2]) == (0, ["netctl", "version"])
    assert not stub.requests
    offline = netctl("version", "--netmaster", "http://127.0.0.1:1")
    assert (offline.code, offline.lines[0][:2]) == (2, ["Client", "version:"])


def test_backup_to_a_file_and_back(netctl: Netctl, stub: Stub, tmp_path: Path) -> None:
    document = b'{"version": 1, "objects": ["\xc3\xa4"]}'
    stub.answers(f"GET {API}/backup", document)
    stub.answers(f"POST {API}/restore", {"restored": 1})
    stub.answers(f"POST {API}/restore?force=1", {"restored": 2})
    path = str(tmp_path / "state.json")
    assert netctl("backup").out == document.decode()
    assert netctl("backup", path).out == f"{path}\n"
    assert netctl("restore", path).out == "restored 1 objects\n"
    assert stub.requests[-1].body == document
    assert netctl("restore", "--force", path).out == "restored 2 objects\n"


def test_backup_and_restore_report_unusable_files(netctl: Netctl, stub: Stub, tmp_path: Path) -> None:
    stub.answers(f"GET {API}/backup", {})
    assert netctl("backup", str(tmp_path / "no" / "x")).code == 4
    assert netctl("restore", str(tmp_path / "missing")).code == 4
    assert not [request for request in stub.requests if request.method == "POST"]


def test_completion_needs_no_netmaster(netctl: Netctl, stub: Stub) -> None:
    result = netctl("completion", "fish")
    assert "complete -c netctl" in result.out
    assert not stub.requests


def test_node_ls_shows_since_when_a_node_is_unreachable(netctl: Netctl, stub: Stub) -> None:
    stub.answers(f"GET {API}/nodes/?limit=1000", [{"name": "n1", "unreachableSince": 1_700_000_000.5}])
    assert netctl("node", "ls").out.endswith("Unreachable since 2023-11-14 22:13:20 UTC\n")


def test_node_ls_shows_why_a_node_is_not_ready(netctl: Netctl, stub: Stub) -> None:
    status = {
        "state": "NotReady",
        "appliedRevision": 17,
        "lag": 0,
        "reasons": ["datapath out of sync: no", "x"],
    }
    stub.answers(f"GET {API}/nodes/?limit=1000", [{"name": "n1", "status": status}])
    assert netctl("node", "ls").out.endswith("NotReady: datapath out of sync: no; x\n")


@pytest.mark.parametrize(
    ("line", "request_line"),
    [
        ("tenant create --wait t1", "PATCH /tenants/t1/?report=1&refuse-opening=1&wait=10"),
        ("tenant rm t1 --wait=0.5 --ignore-unreachable", "DELETE /tenants/t1/?report=1&wait=0.5&ignore-unreachable=1"),
        ("net create --wait=3 -s 10.1.1.0/24 blue", "PATCH /networks/default:blue/?report=1&refuse-opening=1&wait=3"),
        ("policy create p --wait", "PATCH /policys/default:p/?report=1&refuse-opening=1&wait=10"),
        ("policy rule-add --wait p 1", "POST /rules/default:p:1/?report=1&wait=10"),
        ("policy rule-rm p 1 --wait=60", "DELETE /rules/default:p:1/?report=1&wait=60"),
        ("group create --wait blue web", "PATCH /endpointGroups/default:web/?report=1&refuse-opening=1&wait=10"),
        ("netprofile create --wait gold", "PATCH /netprofiles/default:gold/?report=1&refuse-opening=1&wait=10"),
        ("node wait", "POST /sync?wait=10"),
        ("node settle", "POST /sync?wait=10"),
        ("node wait --wait=2 --ignore-unreachable", "POST /sync?wait=2&ignore-unreachable=1"),
    ],
)
def test_a_write_waits_with_the_flag(netctl: Netctl, stub: Stub, line: str, request_line: str) -> None:
    method, path = request_line.split(" ")
    stub.answers(f"{method} {API}{path}", {"revision": 4})
    result = netctl(*line.split())
    assert (result.code, result.err) == (0, "")


def test_global_and_restore_wait_too(netctl: Netctl, stub: Stub, tmp_path: Path) -> None:
    stub.answers(f"GET {API}/globals/global/", {"key": "global"}, headers={"ETag": '"4"'})
    stub.answers(f"PATCH {API}/globals/global/?report=1&wait=10", {})
    assert netctl("global", "set", "--arp-mode", "flood", "--wait").code == 0
    saved = tmp_path / "state.json"
    saved.write_text("{}")
    stub.answers(f"POST {API}/restore?force=1&wait=5", {"restored": 2})
    assert netctl("restore", "--force", "--wait=5", str(saved)).out == "restored 2 objects\n"


def test_a_write_that_some_nodes_have_not_applied_has_its_own_exit_code(netctl: Netctl, stub: Stub) -> None:
    error = {"code": "behind", "message": "written, but not in force on b (Unreachable)", "field": "", "details": {}}
    stub.answers(f"PATCH {API}/tenants/t1/?{GUARDED}&wait=10", error, status=504)
    result = netctl("tenant", "create", "t1", "--wait")
    assert (result.code, result.out) == (5, "")
    assert result.err == "netctl: written, but not in force on b (Unreachable)\n"
    stub.answers(f"PATCH {API}/tenants/t1/?{GUARDED}&wait=10", b"<html>a proxy gave up</html>", status=504)
    assert netctl("tenant", "create", "t1", "--wait").code == 3
