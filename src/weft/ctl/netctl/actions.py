"""The actions of netctl's commands: each takes a parsed command line and yields the text to print.

Factories such as `lists(NETWORK)` make the actions that differ only in the kind of object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from weft import __version__
from weft.ctl import render
from weft.ctl.client import DEFAULT_WAIT, Client, Row, Wait, decode_json, decode_row, decode_rows
from weft.ctl.failures import Usage
from weft.ctl.files import read_document, write_document
from weft.ctl.netctl.kinds import API, FLOW_CHANGES, GLOBAL, INCOMING, NODE, OUTGOING, POLICY, RULE, TENANT, Kind

# Members of a reply that a PUT must not send back.
_ADDED_BY_SERVER = frozenset({"key", "links", "link-sets"})
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
    """Create the object or, as Contiv does, change an existing one; print its key."""

    def save(call: Call) -> Iterator[str]:
        key = kind.spell_key(call.members)
        call.client.request("POST", kind.path(key), body=_encode(call.members), wait=call.wait)
        # The key and nothing else, for scripts.
        yield f"{key}\n"

    return save


def removes(kind: Kind) -> Action:
    """Delete the object; print its key."""

    def remove(call: Call) -> Iterator[str]:
        key = kind.spell_key(call.members)
        call.client.request("DELETE", kind.path(key), wait=call.wait)
        yield f"{key}\n"

    return remove


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
    if "preview" in call.switches:
        yield from _preview(call, [{"put": RULE.plural, "object": dict(call.members)}])
    else:
        yield from saves(RULE)(call)


def remove_rule(call: Call) -> Iterator[str]:
    """Remove a rule or, with --preview, print what that would change."""
    if "preview" in call.switches:
        yield from _preview(call, [{"delete": RULE.plural, "key": RULE.spell_key(call.members)}])
    else:
        yield from removes(RULE)(call)


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
    elif not rows:
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
    """Change only the given settings (W25). If-Match detects a concurrent change."""
    if not call.members:
        raise Usage("nothing to set: give at least one option; see netctl global set --help")
    reply = call.client.request("GET", GLOBAL.path("global"))
    current = {member: value for member, value in decode_row(reply).items() if member not in _ADDED_BY_SERVER}
    call.client.request(
        "PUT",
        GLOBAL.path("global"),
        body=_encode({**current, **call.members}),
        if_match=reply.headers.get("etag", ""),
        wait=call.wait,
    )
    yield "global\n"


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
    query = {"force": "1"} if "force" in call.switches else {}
    reply = call.client.request("POST", f"{API}/restore", query=query, body=document, wait=call.wait)
    restored = decode_row(reply)
    yield f"restored {restored.get('restored', 0)} objects\n"


def purge_kubernetes(call: Call) -> Iterator[str]:
    """Delete the objects that were synced from Kubernetes."""
    reply = call.client.request("DELETE", f"{API}/kubernetes", wait=call.wait)
    yield f"purged {decode_row(reply).get('purged', 0)} objects\n"


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
