"""The actions of netctl's commands: each takes a parsed command line and yields the text to print.

Factories such as `lists(NETWORK)` make the actions that differ only in the kind of object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from weft import __version__
from weft.ctl import render
from weft.ctl.client import DEFAULT_WAIT, Client, Row, Wait, decode_json, decode_row, decode_rows
from weft.ctl.failures import Usage
from weft.ctl.files import read_document, write_document
from weft.ctl.netctl.kinds import API, FLOW_CHANGES, GLOBAL, INCOMING, NODE, OUTGOING, POLICY, RULE, TENANT, Kind

# Members that a rule of this direction does not use (O13).
_NOT_FOR = {
    "in": {"toEndpointGroup": "--to-group", "toNetwork": "--to-network"},
    "out": {
        "fromEndpointGroup": "--from-group",
        "fromNetwork": "--from-network",
        "fromIpAddress": "--from-ip-address",
    },
}


class Call(NamedTuple):
    """A parsed command line: JSON members, switches, and the seconds of --wait."""

    members: Mapping[str, object]
    switches: frozenset[str]
    client: Client
    seconds: float = 0.0

    @property
    def wait(self) -> Wait | None:
        """How to wait until the nodes have applied a write; None without --wait."""
        return Wait(self.seconds, ignore_unreachable="ignore-unreachable" in self.switches) if self.seconds else None


Action = Callable[[Call], Iterator[str]]


def saves(kind: Kind) -> Action:
    """Create the object or change the given members of an existing one; print its key and what has changed."""

    def save(call: Call) -> Iterator[str]:
        key = kind.spell_key(call.members)
        # netmaster merges and checks at the commit, so that a concurrent change is neither lost nor opened.
        guard = {} if "force" in call.switches else {"refuse-opening": "1"}
        yield from _write(call, "PATCH", kind.path(key), query=guard, members=call.members)

    return save


def removes(kind: Kind) -> Action:
    """Delete the object; print its key."""

    def remove(call: Call) -> Iterator[str]:
        yield from _write(call, "DELETE", kind.path(kind.spell_key(call.members)))

    return remove


def _write(
    call: Call,
    method: str,
    path: str,
    *,
    query: Mapping[str, str] | None = None,
    members: Mapping[str, object] | None = None,
) -> Iterator[str]:
    """Send a write, or with --preview its dry run, and print netmaster's report of it."""
    is_preview = "preview" in call.switches
    options = {"dry-run": "1"} if is_preview else {"report": "1", **(query or {})}
    body = b"" if members is None else _encode(members)
    wait = None if is_preview else call.wait
    report = decode_row(call.client.request(method, path, query=options, body=body, wait=wait))
    yield from _format_preview(report) if is_preview else _format_report(report)


def _format_report(report: Row) -> Iterator[str]:
    # The key comes first, for scripts.
    yield f"{report.get('key', '')} {_outcome(report)}\n"
    yield from (f"opens: {line}\n" for line in _items(report, "opens"))


def _format_preview(report: Row) -> Iterator[str]:
    outcome = _outcome(report)
    would = outcome.replace("changed:", "change:", 1) if outcome.startswith("changed") else f"be {outcome}"
    yield f"{report.get('key', '')} would {would}\n"
    yield from (f"would open: {line}\n" for line in _items(report, "opens"))
    yield from _format_verdicts([row for row in _items(report, "verdicts") if isinstance(row, dict)])


def _outcome(report: Row) -> str:
    changes = [_format_change(change) for change in _items(report, "changes") if isinstance(change, dict)]
    return f"changed: {', '.join(changes)}" if changes else str(report.get("outcome", ""))


def _format_change(change: Row) -> str:
    """`policies -old +new` for a list, `mode enforce -> audit` for anything else."""
    member, before, after = change.get("member"), change.get("before"), change.get("after")
    if isinstance(before, list) or isinstance(after, list):
        old, new = (value if isinstance(value, list) else [] for value in (before, after))
        moved = [f"-{item}" for item in old if item not in new] + [f"+{item}" for item in new if item not in old]
        return f"{member} {' '.join(moved) or 'order'}"
    return f"{member} {'none' if before is None else before} -> {'none' if after is None else after}"


def _items(report: Row, member: str) -> list[object]:
    items = report.get(member)
    return items if isinstance(items, list) else []


def inspects(kind: Kind) -> Action:
    """Print the object's configuration and operational state."""

    def inspect(call: Call) -> Iterator[str]:
        reply = call.client.request("GET", kind.inspect_path(kind.spell_key(call.members)))
        yield render.json_document(decode_json(reply))

    return inspect


def lists(kind: Kind) -> Action:
    """Print the objects of a tenant or of all tenants; an unknown tenant is an error."""

    def list_(call: Call) -> Iterator[str]:
        tenant = "" if "all" in call.switches else str(call.members.get("tenantName", ""))
        rows = list(call.client.rows(kind.path(), query={"tenantName": tenant} if tenant else {}))
        # REST returns an empty list for an unknown tenant; reading the tenant makes it an error.
        if tenant and not rows:
            call.client.request("GET", TENANT.path(tenant))
        if "quiet" in call.switches:
            yield render.names(kind.name, rows)
        elif "json" in call.switches:
            yield render.json_array(rows)
        else:
            yield render.table(kind.columns, rows)

    return list_


def list_nodes(call: Call) -> Iterator[str]:
    """Print all nodes with their state and applied revision."""
    rows = list(call.client.rows(NODE.path(), query={}))
    if "quiet" in call.switches:
        yield render.names(NODE.name, rows)
    elif "json" in call.switches:
        yield render.json_array(rows)
    else:
        yield render.table(NODE.columns, ({**row, **_status(row), "state": _state(row)} for row in rows))


def wait_for_nodes(call: Call) -> Iterator[str]:
    """Wait until every node has applied all writes so far; print the applied revision."""
    wait = call.wait or Wait(DEFAULT_WAIT, ignore_unreachable="ignore-unreachable" in call.switches)
    synced = decode_row(call.client.request("POST", f"{API}/sync", wait=wait))
    yield f"{synced.get('revision', '')}\n"


def add_rule(call: Call) -> Iterator[str]:
    """Add a rule; flags that do not apply to its direction are an error before anything is sent."""
    direction = str(call.members["direction"])
    for member, flag in _NOT_FOR.get(direction, {}).items():
        if call.members.get(member):
            raise Usage(f"{flag} does not apply to a rule with direction {direction}: leave it out")
    # A rule never changes: the whole rule is sent, and another one of this id is refused.
    yield from _write(call, "POST", RULE.path(RULE.spell_key(call.members)), members=call.members)


def diff_policy(call: Call) -> Iterator[str]:
    """Print the flows whose verdict the changes in a file would change."""
    try:
        changes = json.loads(read_document(str(call.members["file"])))
    except ValueError as error:
        raise Usage(f"{call.members['file']}: not JSON: {error}") from error
    yield from _preview(call, changes)


def _preview(call: Call, changes: object) -> Iterator[str]:
    reply = call.client.request("POST", f"{API}/policydiff", body=_encode({"changes": changes}))
    rows = decode_rows(reply)
    if "json" in call.switches:
        yield render.json_array(rows)
    else:
        yield from _format_verdicts(rows)


def _format_verdicts(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        yield "no verdict would change\n"
    else:
        shown = ({**row, "verdict": "allowed" if row.get("allowed") else "blocked"} for row in rows)
        yield render.table(FLOW_CHANGES, shown)


def list_rules(call: Call) -> Iterator[str]:
    """Print the rules of a policy by direction, the lowest priority first; an unknown policy is an error."""
    query = {"tenantName": str(call.members["tenantName"]), "policyName": str(call.members["policyName"])}
    # Sorted here: REST pages by key, and priorities are not part of it.
    rules = sorted(call.client.rows(RULE.path(), query=query), key=_priority)
    if not rules:
        call.client.request("GET", POLICY.path(POLICY.spell_key(call.members)))
    if "quiet" in call.switches:
        yield render.names(RULE.name, rules)
    elif "json" in call.switches:
        yield render.json_array(rules)
    else:
        yield "Incoming Rules:\n" + render.table(INCOMING, (rule for rule in rules if rule.get("direction") == "in"))
        yield "Outgoing Rules:\n" + render.table(OUTGOING, (rule for rule in rules if rule.get("direction") == "out"))


def show_global(call: Call) -> Iterator[str]:
    """Print the settings of the cluster."""
    settings = decode_row(call.client.request("GET", GLOBAL.path("global")))
    yield render.json_document(settings) if "json" in call.switches else render.card(GLOBAL.columns, settings)


def inspect_global(call: Call) -> Iterator[str]:
    """Print the settings of the cluster and the tags in use."""
    yield render.json_document(decode_json(call.client.request("GET", GLOBAL.inspect_path("global"))))


def set_global(call: Call) -> Iterator[str]:
    """Change only the given settings (W25)."""
    if not call.members:
        raise Usage("nothing to set: give at least one option; see netctl global set --help")
    yield from _write(call, "PATCH", GLOBAL.path("global"), members=call.members)


def show_version(call: Call) -> Iterator[str]:
    """Print the versions of netctl and netmaster; netctl's also if netmaster is unreachable."""
    # Before the request, which may fail.
    yield f"Client version: {__version__}\n"
    server = decode_row(call.client.request("GET", "/version"))
    yield f"Server version: {server.get('Version', '')}\n"
    yield f"Server commit:  {server.get('GitCommit', '')}\n"
    yield f"Server built:   {server.get('BuildTime', '')}\n"


def backup(call: Call) -> Iterator[str]:
    """Write the state of the cluster to a file, atomically, or to the standard output."""
    document = call.client.request("GET", f"{API}/backup").body
    if path := str(call.members.get("file", "")):
        write_document(path, document)
        yield f"{path}\n"
    else:
        # `_print` encodes with the same handler, so the bytes stay as they are.
        yield document.decode(errors="surrogateescape")


def restore(call: Call) -> Iterator[str]:
    """Replace the state of the cluster by a backup."""
    document = read_document(str(call.members["file"]))
    reply = _send_forcible(call, "POST", f"{API}/restore", body=document)
    if "preview" in call.switches:
        yield from _format_restore_plan(reply)
    else:
        yield f"restored {reply.get('restored', 0)} objects\n"


def _send_forcible(call: Call, method: str, path: str, *, body: bytes = b"") -> Row:
    """Send a request that --force allows, or with --preview its dry run."""
    is_preview = "preview" in call.switches
    query = {"dry-run": "1"} if is_preview else {"force": "1"} if "force" in call.switches else {}
    return decode_row(call.client.request(method, path, query=query, body=body, wait=None if is_preview else call.wait))


def _format_restore_plan(plan: Row) -> Iterator[str]:
    counts = plan.get("counts")
    numbers = counts if isinstance(counts, dict) else {}
    for member, verb in (("created", "create"), ("changed", "change"), ("deleted", "delete")):
        keys = _items(plan, member)
        yield from (f"would {verb} {key}\n" for key in keys)
        # netmaster names a bounded number of them.
        if (missing := int(numbers.get(member, 0)) - len(keys)) > 0:
            yield f"would {verb} {missing} more\n"
    yield f"{numbers.get('unchanged', 0)} objects would stay as they are\n"
    if plan.get("needsForce"):
        yield "the state is not empty: restore needs --force\n"


def purge_kubernetes(call: Call) -> Iterator[str]:
    """Delete the objects that were synced from Kubernetes."""
    reply = _send_forcible(call, "DELETE", f"{API}/kubernetes")
    if "preview" not in call.switches:
        yield f"purged {reply.get('purged', 0)} objects\n"
        return
    named = _items(reply, "policies")
    yield from (f"would lift NetworkPolicy {name}\n" for name in named)
    if (missing := int(str(reply.get("networkPolicies", 0))) - len(named)) > 0:
        yield f"would lift {missing} more\n"
    counts = reply.get("counts")
    yield f"would purge {sum(counts.values()) if isinstance(counts, dict) else 0} objects\n"


def print_completion(call: Call) -> Iterator[str]:
    """Print the completion script of a shell, which `make docs` generates from the command table."""
    from importlib.resources import files  # noqa: PLC0415 - slow to import, and only this command needs it

    yield (files("weft.ctl.completions") / f"netctl.{call.members['shell']}").read_text(encoding="utf-8")


def _encode(members: Mapping[str, object]) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()


def _status(node: Row) -> Row:
    status = node.get("status")
    return status if isinstance(status, dict) else {}


def _state(node: Row) -> str:
    since, status = node.get("unreachableSince"), _status(node)
    # An unreachable node's own status is outdated, so this comes first.
    if isinstance(since, int | float) and since:
        return time.strftime("Unreachable since %Y-%m-%d %H:%M:%S UTC", time.gmtime(since))
    state, reasons = status.get("state", "Ready"), status.get("reasons")
    if state == "NotReady" and isinstance(reasons, list):
        return f"NotReady: {'; '.join(map(str, reasons))}"
    return str(state)


def _priority(rule: Row) -> int:
    priority = rule.get("priority")
    return priority if isinstance(priority, int) else 0
