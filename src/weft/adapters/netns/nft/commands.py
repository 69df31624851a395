"""Builds the nft commands that create a table, or bring an existing one up to date, in one transaction (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

ADDRESS_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
# The nft keyword of each address family.
IP = {4: "ip", 6: "ip6"}


def table_commands(
    table: str, *, declarations: Iterable[str], chains: Mapping[str, Sequence[str]], stubs: Iterable[str] = ()
) -> str:
    """Return commands that declare sets, maps and chains, then flush and refill the chains.

    Elements and counters of sets and maps that exist already stay. `table` is family and name. The first rule of a base
    chain is its `type … hook …` specification. `stubs` are chains that only have to exist: others fill them.
    """
    lines = [f"add table {table}", f"table {table} {{", *declarations]
    # Every chain is declared before any rule is added: rules may jump to chains that come later.
    lines += [f"chain {name} {{ }}" for name in stubs]
    lines += [f"chain {name} {{ {rules[0] if _is_hook(rules[0]) else ''} }}" for name, rules in chains.items()]
    lines.append("}")
    lines += [f"flush chain {table} {name}" for name in chains]
    lines += [
        f"add rule {table} {name} {rule}" for name, rules in chains.items() for rule in rules if not _is_hook(rule)
    ]
    return "".join(f"{line}\n" for line in lines)


def replace_table(table: str, commands: str) -> str:
    """Return commands that delete the table, whether or not it exists, and then create it."""
    # `delete table` fails if there is none, so `add table` comes first. `destroy table` needs a newer nft and kernel.
    return f"add table {table}\ndelete table {table}\n{commands}"


def _is_hook(rule: str) -> bool:
    return rule.startswith("type ")
