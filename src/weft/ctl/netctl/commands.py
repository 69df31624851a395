"""The command table of netctl: nouns, verbs, arguments, flags and actions (docs/compatibility/contiv.md, section 3).

Parser, help, completion and reference come from it. ACI and `login` are not supported.
"""

from __future__ import annotations

from weft.ctl.client import DEFAULT_WAIT
from weft.ctl.netctl import actions, kinds
from weft.ctl.netctl.actions import inspects, lists, removes, saves
from weft.ctl.netctl.cli_spec import Argument, Command, Flag, Noun
from weft.ctl.netctl.kinds import Kind

# Flags that many commands share. The short names are Contiv's.
_TENANT = Flag(("--tenant", "-t"), "the tenant", member="tenantName", default="default")
_ALL = Flag(("--all", "-a"), "all tenants", form="switch")
_JSON = Flag(("--json", "-j"), "print JSON instead of a table", form="switch")
_PREVIEW = Flag(("--preview", "--dry-run"), "write nothing; only show what would change", form="switch")
_FORCE = Flag(("--force",), "change an existing object even if that newly allows traffic", form="switch")
_QUIET = Flag(("--quiet", "-q"), "print names only", form="switch")
_WAIT = (
    Flag(
        ("--wait",),
        f"return when every node has applied it; --wait=5 gives up after 5 seconds, --wait after {DEFAULT_WAIT:g}",
        form="wait",
        placeholder="SECONDS",
    ),
    Flag(("--ignore-unreachable",), "with --wait: do not wait for unreachable nodes", form="switch"),
)

_POLICY = Argument("policyName", "POLICY", "name of the policy")
_RULE = Argument("ruleId", "RULE", "id of the rule, unique in its policy")

# The last argument of a kind's commands: its own name.
_NAMES = {
    kinds.TENANT: Argument("tenantName", "TENANT", "name of the tenant"),
    kinds.NETWORK: Argument("networkName", "NETWORK", "name of the network"),
    kinds.GROUP: Argument("groupName", "GROUP", "name of the group"),
    kinds.POLICY: _POLICY,
    kinds.PROFILE: Argument("profileName", "NAME", "name of the netprofile"),
    kinds.SERVICE: Argument("serviceName", "NAME", "name of the service"),
    kinds.BGP: Argument("hostname", "HOST", "name of the node whose session it is"),
    kinds.ENDPOINT: Argument("endpointID", "ID", "any part of an endpoint id, container id or container name"),
}


def _create(kind: Kind, text: str, *, before: tuple[Argument, ...] = (), flags: tuple[Flag, ...] = ()) -> Command:
    arguments = (*before, _NAMES[kind])
    scope = (_TENANT,) if kind.of_tenant else ()
    return Command(("create",), text, saves(kind), arguments, (*scope, *flags, _FORCE, _PREVIEW, *_WAIT))


def _remove(kind: Kind, text: str) -> Command:
    scope = (_TENANT,) if kind.of_tenant else ()
    return Command(("rm", "delete"), text, removes(kind), (_NAMES[kind],), (*scope, _PREVIEW, *_WAIT))


def _inspect(kind: Kind, text: str) -> Command:
    return Command(("inspect",), text, inspects(kind), (_NAMES[kind],), (_TENANT,) if kind.of_tenant else ())


def _list(kind: Kind, text: str, *, in_tenants: bool = True) -> Command:
    # Endpoints are listed by tenant too, although their key has none.
    scope = (_TENANT, _ALL) if in_tenants else ()
    return Command(("ls", "list"), text, lists(kind), (), (*scope, _JSON, _QUIET))


# Nouns with their verbs.
NOUNS = (
    Noun(
        ("group",),
        "endpoints of a network that share policies",
        (
            _create(
                kinds.GROUP,
                "Create a group of endpoints on a network, or change it",
                before=(_NAMES[kinds.NETWORK],),
                flags=(
                    Flag(("--policy", "-p"), "attach these policies only (may be repeated)", "policies", "list"),
                    Flag(("--no-policy",), "detach all policies", "policies", "clear"),
                    Flag(("--networkprofile", "-n"), "attach a netprofile", "netProfile", placeholder="NAME"),
                    Flag(("--no-networkprofile",), "detach the netprofile", "netProfile", "clear"),
                    Flag(
                        ("--ip-pool", "-r"),
                        "addresses of the network reserved for this group",
                        "ipPool",
                        placeholder="FIRST-LAST",
                    ),
                    # Stored for Contiv clients; nothing else reads it.
                    Flag(("--epg-tag", "--tag"), "tag for other systems", "cfgdTag", placeholder="TAG"),
                    Flag(
                        ("--pkt-tag",),
                        "its own VLAN id, in a network with encap vlan",
                        "pktTag",
                        "number",
                        placeholder="TAG",
                    ),
                ),
            ),
            _inspect(kinds.GROUP, "Show a group with its endpoints"),
            _remove(kinds.GROUP, "Delete a group"),
            _list(kinds.GROUP, "List groups"),
        ),
    ),
    Noun(
        ("endpoint", "ep"),
        "network attachments of workloads",
        (
            _inspect(kinds.ENDPOINT, "Show an endpoint"),
            _list(kinds.ENDPOINT, "List endpoints"),
        ),
    ),
    Noun(
        ("node",),
        "machines that run the agent",
        (
            Command(("ls", "list"), "List nodes with their state", actions.list_nodes, (), (_JSON, _QUIET)),
            Command(
                ("wait",),
                "Wait until every node has applied all changes so far",
                actions.wait_for_nodes,
                flags=_WAIT,
                hidden=("settle",),  # its former name
            ),
        ),
    ),
    Noun(
        ("netprofile",),
        "bandwidth and DSCP of the endpoints of groups",
        (
            _create(
                kinds.PROFILE,
                "Create a netprofile, or change it",
                flags=(
                    Flag(
                        ("--bandwidth", "-b"), "limit of each endpoint, such as 10Mbps", "bandwidth", placeholder="RATE"
                    ),
                    Flag(("--no-bandwidth",), "remove the limit", "bandwidth", "clear"),
                    Flag(("--dscp", "-d"), "DSCP of sent packets, 0 to 63", "DSCP", "number"),
                    Flag(("--burst", "-s"), "burst in kilobytes", "burst", "number", placeholder="KILOBYTES"),
                ),
            ),
            _remove(kinds.PROFILE, "Delete a netprofile"),
            _list(kinds.PROFILE, "List netprofiles"),
            _inspect(kinds.PROFILE, "Show a netprofile"),
        ),
    ),
    Noun(
        ("network", "net"),
        "subnets of a tenant",
        (
            _create(
                kinds.NETWORK,
                "Create a network",
                flags=(
                    Flag(("--nw-type", "-n"), "type; data if it is new", "nwType", values=("data", "infra")),
                    Flag(("--encap", "-e"), "encapsulation; vxlan if it is new", "encap", values=("vlan", "vxlan")),
                    Flag(
                        ("--pkt-tag", "-p"),
                        "VLAN id or VNI; netmaster chooses it by default",
                        "pktTag",
                        "number",
                        placeholder="TAG",
                    ),
                    Flag(
                        ("--subnet", "-s"),
                        "IPv4 subnet, or a range FIRST-LAST/LENGTH of one",
                        "subnet",
                        required=True,
                        placeholder="CIDR",
                    ),
                    Flag(("--gateway", "-g"), "IPv4 gateway", "gateway", placeholder="ADDRESS"),
                    # Contiv's short flags; argparse matches `-s6` as a whole before it tries `-s` with the value 6.
                    Flag(("--subnetv6", "-s6"), "IPv6 subnet", "ipv6Subnet", placeholder="CIDR"),
                    Flag(("--gatewayv6", "-g6"), "IPv6 gateway", "ipv6Gateway", placeholder="ADDRESS"),
                    Flag(("--nw-tag", "--tag"), "tag for other systems", "cfgdTag", placeholder="TAG"),
                ),
            ),
            _remove(kinds.NETWORK, "Delete a network"),
            _list(kinds.NETWORK, "List networks"),
            _inspect(kinds.NETWORK, "Show a network with its addresses and endpoints"),
        ),
    ),
    Noun(
        ("tenant",),
        "isolated owners of virtual networks",
        (
            _create(
                kinds.TENANT,
                "Create a tenant, or change it",
                flags=(
                    Flag(
                        ("--external-range",),
                        "addresses at which its services may be reached from outside (may be repeated)",
                        "externalRanges",
                        "list",
                        placeholder="CIDR",
                    ),
                    Flag(("--no-external-range",), "remove all external ranges", "externalRanges", "clear"),
                ),
            ),
            _remove(kinds.TENANT, "Delete a tenant"),
            _inspect(kinds.TENANT, "Show a tenant with its objects"),
            _list(kinds.TENANT, "List tenants", in_tenants=False),
        ),
    ),
    Noun(
        ("policy",),
        "rules that allow and deny",
        (
            Command(
                ("create",),
                "Create a policy without rules, or change its mode",
                saves(kinds.POLICY),
                (_POLICY,),
                (
                    _TENANT,
                    Flag(
                        ("--mode",),
                        "audit: evaluate and report its rules, but do not enforce them",
                        "mode",
                        values=("enforce", "audit"),
                    ),
                    _FORCE,
                    _PREVIEW,
                    *_WAIT,
                ),
            ),
            _remove(kinds.POLICY, "Delete a policy with its rules"),
            _inspect(kinds.POLICY, "Show a policy with its endpoints"),
            _list(kinds.POLICY, "List policies"),
            Command(
                ("rule-add",),
                "Add a rule to a policy",
                actions.add_rule,
                (_POLICY, _RULE),
                (
                    _TENANT,
                    Flag(("--priority", "-p"), "1 to 100; higher wins", "priority", "number", default=1),
                    # Values are not `choices` of argparse: netmaster rejects others with a better message.
                    Flag(("--direction", "-d"), "seen from the group", "direction", default="in", values=("in", "out")),
                    Flag(("--from-group", "-g"), "source group (in)", "fromEndpointGroup", placeholder="GROUP"),
                    Flag(("--to-group", "-e"), "destination group (out)", "toEndpointGroup", placeholder="GROUP"),
                    Flag(("--from-network", "-n"), "source network (in)", "fromNetwork", placeholder="NETWORK"),
                    Flag(("--to-network", "-o"), "destination network (out)", "toNetwork", placeholder="NETWORK"),
                    Flag(("--from-ip-address", "-i"), "source address (in)", "fromIpAddress", placeholder="CIDR"),
                    Flag(("--to-ip-address", "-s"), "destination address", "toIpAddress", placeholder="CIDR"),
                    Flag(
                        ("--protocol", "-l"),
                        "protocol or its number; any by default",
                        "protocol",
                        values=("tcp", "udp", "icmp"),
                    ),
                    Flag(("--port", "-P"), "destination port; any by default", "port", "number"),
                    Flag(("--action", "-j"), "allow or deny", "action", default="allow", values=("allow", "deny")),
                    _PREVIEW,
                    *_WAIT,
                ),
            ),
            Command(("rule-rm",), "Remove a rule", removes(kinds.RULE), (_POLICY, _RULE), (_TENANT, _PREVIEW, *_WAIT)),
            Command(
                ("rule-ls",), "List the rules of a policy", actions.list_rules, (_POLICY,), (_TENANT, _JSON, _QUIET)
            ),
            Command(
                ("diff",),
                "Show which verdicts a set of changes would change, without applying them",
                actions.diff_policy,
                (
                    Argument(
                        "file", "FILE", 'JSON list of {"put": PLURAL, "object": {…}} and {"delete": PLURAL, "key": …}'
                    ),
                ),
                (_JSON,),
            ),
        ),
    ),
    Noun(
        ("global",),
        "settings of the whole cluster",
        (
            Command(
                ("info",),
                "Show the settings",
                actions.show_global,
                flags=(
                    _TENANT._replace(text="ignored; accepted for Contiv scripts", default=None),
                    _ALL._replace(text="ignored; accepted for Contiv scripts"),
                    _JSON,
                ),
            ),
            Command(("inspect",), "Show the settings and the tags in use", actions.inspect_global),
            Command(
                ("set",),
                "Change the given settings only",
                actions.set_global,
                flags=(
                    Flag(
                        ("--fabric-mode", "-f"),
                        "kind of fabric",
                        "networkInfraType",
                        values=("default", "aci", "aci-opflex"),
                    ),
                    Flag(("--vlan-range", "-v"), "VLAN tags to give out", "vlans", placeholder="FIRST-LAST"),
                    Flag(("--vxlan-range", "-x"), "VXLAN ids to give out", "vxlans", placeholder="FIRST-LAST"),
                    Flag(("--fwd-mode", "-b"), "how packets are forwarded", "fwdMode", values=("bridge", "routing")),
                    Flag(("--arp-mode", "-a"), "how ARP is answered", "arpMode", values=("proxy", "flood")),
                    Flag(
                        ("--private-subnet", "-s"),
                        "subnet of the nodes' own addresses, a /16",
                        "pvtSubnet",
                        placeholder="CIDR",
                    ),
                    _PREVIEW,
                    *_WAIT,
                ),
            ),
        ),
    ),
    Noun(
        ("bgp",),
        "BGP sessions of nodes",
        (
            _create(
                kinds.BGP,
                "Create the BGP session of a node, or change it",
                flags=(
                    Flag(
                        ("--router-ip",),
                        "address of the node on the link",
                        "routerip",
                        required=True,
                        placeholder="CIDR",
                    ),
                    # Text and not a number, as in Contiv's schema.
                    Flag(("--as",), "AS number of the node", "as", required=True),
                    Flag(("--neighbor-as",), "AS number of the router", "neighbor-as", required=True, placeholder="AS"),
                    Flag(("--neighbor",), "address of the router", "neighbor", required=True, placeholder="ADDRESS"),
                ),
            ),
            _remove(kinds.BGP, "Delete a BGP session"),
            _list(kinds.BGP, "List BGP sessions", in_tenants=False),
            _inspect(kinds.BGP, "Show a BGP session with its state and routes"),
        ),
    ),
    Noun(
        ("service",),
        "load-balanced virtual IPs",
        (
            _create(
                kinds.SERVICE,
                "Create a service, or change it and keep its address",
                flags=(
                    Flag(("--network", "-s"), "network of its address", "networkName", required=True),
                    Flag(
                        ("--selector", "-l"),
                        "label of its backends (may be repeated)",
                        "selectors",
                        "list",
                        required=True,
                        placeholder="KEY=VALUE",
                    ),
                    Flag(
                        ("--port", "-p"),
                        "port of the service, port of its backends, and TCP or UDP (may be repeated)",
                        "ports",
                        "list",
                        required=True,
                        placeholder="PORT:PORT:PROTOCOL",
                    ),
                    Flag(("--preferred-ip", "--ip"), "requested VIP", "ipAddress", placeholder="ADDRESS"),
                    Flag(("--preferred-ipv6",), "requested IPv6 VIP", "ipv6Address", placeholder="ADDRESS"),
                ),
            ),
            _remove(kinds.SERVICE, "Delete a service"),
            _list(kinds.SERVICE, "List services"),
            _inspect(kinds.SERVICE, "Show a service with its VIP and backends"),
        ),
    ),
)

# Commands without a noun.
COMMANDS = (
    Command(("version",), "Show the versions of netctl and netmaster", actions.show_version),
    Command(
        ("backup",),
        "Save the state of the cluster",
        actions.backup,
        (Argument("file", "FILE", "file to write; the standard output by default", optional=True),),
    ),
    Command(
        ("restore",),
        "Restore a saved state",
        actions.restore,
        (Argument("file", "FILE", "file that backup wrote; - is the standard input"),),
        (Flag(("--force",), "replace a state that is not empty", form="switch"), _PREVIEW, *_WAIT),
    ),
    Command(
        ("purge-kubernetes",),
        "Delete the objects synced from Kubernetes, after netmaster has left mode kubernetes; lifts NetworkPolicies",
        actions.purge_kubernetes,
        (),
        (Flag(("--force",), "also if that lifts NetworkPolicies", form="switch"), _PREVIEW, *_WAIT),
    ),
    Command(
        ("completion",),
        "Print a completion script, for bash: source <(netctl completion bash)",
        actions.print_completion,
        (Argument("shell", "SHELL", "the shell", values=("bash", "zsh", "fish")),),
    ),
)

# Flags of every command; the environment variables in brackets are used without the flag.
GLOBAL_FLAGS = (
    Flag(("--netmaster",), "URL of netmaster (NETMASTER)", placeholder="URL", default="http://127.0.0.1:9999"),
    Flag(("--insecure",), "do not verify netmaster's certificate (INSECURE)", form="switch"),
    Flag(("--cacert",), "CA certificates to verify it with (NETCTL_CACERT)", placeholder="FILE"),
    Flag(("--timeout",), "timeout of each request", default=30, placeholder="SECONDS"),
)
