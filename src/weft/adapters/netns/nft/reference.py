"""Generates docs/reference/nft-tables.md: every chain, set and map with its purpose, and the device names.

The purposes are declared beside the rules (`CHAINS`, `SETS` of each module). Their keys are templates: `{4,6}` stands
for one of the alternatives, as in a shell, and `{word}` for a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from weft.adapters.netns import qos
from weft.adapters.netns.devices import DEVICE_NAMES
from weft.adapters.netns.drop_reasons import DROP_REASONS
from weft.adapters.netns.host import nat_tenant, ruleset, vtep_ruleset
from weft.adapters.netns.nft import base, bridge_filter, policy_chains, prefix_lookup, service_chains
from weft.adapters.netns.nft.service_chains import BackendSelector, selector_commands, selector_id
from weft.domain.addresses import Address

_BASE_CHAIN = re.compile(r"chain (?:\w+ weft )?(\w+) \{\s*type (\w+) hook (\w+)[^;]*priority ([^;]+);")
# Any address will do: it only appears in rules.
_ANY_ADDRESS = Address(4, 0)
_ANY_VTEP = vtep_ruleset.VtepConfig(_ANY_ADDRESS, 4789)


class TableReference(NamedTuple):
    """An nft table: its heading, the purposes of its chains and sets, and the text of a complete ruleset."""

    heading: str
    about: str
    chains: Mapping[str, str]
    sets: Mapping[str, str]
    ruleset: str


def _dscp_commands(table: str) -> str:
    return "".join(qos.dscp_commands([46], target) for target, name in qos.DSCP_TABLES.items() if name == table)


TABLES = (
    TableReference(
        "inet weft",
        "In each tenant netns.",
        base.CHAINS
        | policy_chains.CHAINS
        | prefix_lookup.CHAINS
        | service_chains.CHAINS
        | nat_tenant.CHAINS
        | bridge_filter.CHAINS
        | qos.CHAINS,
        base.SETS | policy_chains.SETS | service_chains.SETS | nat_tenant.SETS | bridge_filter.SETS | qos.SETS,
        base.BASE
        # Chains that are only created when an entry needs them.
        + selector_commands(
            [BackendSelector(selector_id(2, 60), scope) for scope in ("", service_chains.EXTERNAL)], table="weft"
        )
        + _dscp_commands("inet weft"),
    ),
    TableReference(
        "bridge weft",
        "In each tenant netns in bridge mode, for frames between ports of a bridge.",
        bridge_filter.BRIDGE_CHAINS | qos.CHAINS,
        bridge_filter.BRIDGE_SETS_PURPOSES | qos.SETS,
        bridge_filter.BRIDGE_BASE + _dscp_commands("bridge weft"),
    ),
    TableReference(
        "netdev weft",
        "In each tenant netns whose workloads the hosts of other nodes connect to.",
        nat_tenant.NETDEV_CHAINS,
        nat_tenant.NETDEV_SETS,
        nat_tenant.NETDEV_BASE,
    ),
    TableReference(
        "inet weft_host",
        "In the host netns, while the node has a tenant.",
        ruleset.CHAINS,
        ruleset.SETS,
        ruleset.host_table(ruleset.HostRules(), ruleset.HostConfig(_ANY_ADDRESS, 4789)),
    ),
    TableReference(
        "inet weft_vxlan",
        "In the host netns, from the start of the agent until `weft uninstall-node`.",
        vtep_ruleset.CHAINS,
        vtep_ruleset.SETS,
        vtep_ruleset.declare_commands(_ANY_VTEP) + vtep_ruleset.chain_commands(_ANY_VTEP),
    ),
)


def template_pattern(template: str) -> re.Pattern[str]:
    """Return the pattern of the names that a template stands for."""

    def alternatives(match: re.Match[str]) -> str:
        return f"(?:{match[1].replace(',', '|')})" if "," in match[1] else r"\d+"

    return re.compile(re.sub(r"\{([^}]*)\}", alternatives, template))


def declared_names(ruleset_text: str, *kinds: str) -> Iterator[str]:
    """Yield the names of the chains, sets or maps that a ruleset declares, in its order."""
    declaration = rf"^(?:add )?(?:{'|'.join(kinds)}) (?:(?:inet|bridge) \w+ )?(\w+) ?(?:{{|$)"
    yield from re.findall(declaration, ruleset_text, re.MULTILINE)


def _hooks(table: TableReference) -> dict[str, str]:
    """Return the columns type, hook and priority of each base chain."""
    return {
        name: f"{kind} | {hook} | {priority.strip()}"
        for name, kind, hook, priority in _BASE_CHAIN.findall(table.ruleset)
    }


def _kind(table: TableReference, template: str) -> str:
    pattern = template_pattern(template)
    return "map" if any(map(pattern.fullmatch, declared_names(table.ruleset, "map"))) else "set"


def _lines() -> Iterator[str]:
    yield "# nftables tables, and device names"
    yield ""
    yield "Generated from `weft.adapters.netns` by `make docs`. In names, `{4,6}` is the address family, `_external`"
    yield "is for clients that enter through the host link. Base chains have a type, a hook and a priority."
    yield ""
    yield "A selector id combines the number of a frontend's backends with its affinity timeout; it selects the"
    yield "`lb_pick` chain. A hash slot is a hash of a backend's address and port; unlike its index it stays the same"
    yield "when other backends change."
    for table in TABLES:
        hooks = _hooks(table)
        yield from ("", f"## {table.heading}", "", table.about, "")
        yield from ("| chain | type | hook | priority | purpose |", "|---|---|---|---|---|")
        yield from (f"| `{name}` | {hooks.get(name, ' |  | ')} | {purpose} |" for name, purpose in table.chains.items())
        yield from ("", "| set or map | kind | purpose |", "|---|---|---|")
        yield from (f"| `{name}` | {_kind(table, name)} | {purpose} |" for name, purpose in table.sets.items())
    yield from ("", "## Drop reasons", "")
    yield "The packet mark of a dropped packet in nflog, and the key in `drop_counters`."
    yield from ("", "| mark | reason |", "|---|---|")
    yield from (f"| `{number:#x}` | `{reason}` |" for number, reason in DROP_REASONS.items())
    yield from ("", "## Device names", "", "| name | device |", "|---|---|")
    yield from (f"| `{name}` | {purpose} |" for name, purpose in DEVICE_NAMES.items())


def reference() -> str:
    """Return the page."""
    return "".join(f"{line}\n" for line in _lines())


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201  a page for a person
