"""What the commands do: each action takes a parsed call and yields the text to print.

Actions that differ only in the kind of object are made from the kind (`lists(NETWORK)`), so the table of commands
names what happens.
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

_ADDED_BY_SERVER = frozenset({"key", "links", "link-sets"})
_NOT_FOR = {
    "in": {"toEndpointGroup": "--to-group", "toNetwork": "--to-network"},
    "out": {
        "fromEndpointGroup": "--from-group",
        "fromNetwork": "--from-network",
        "fromIpAddress": "--from-ip-address",
    },
}


class Call(NamedTuple):
    """A command line that was understood: JSON members by name, the switches that were set, and for how many seconds
    to wait, where it says so."""

    given: Mapping[str, object]
    switches: frozenset[str]
    client: Client
    seconds: float = 0.0

    @property
    def wait(self) -> Wait | None:
        """How to wait until a write is in force everywhere."""
        return Wait(self.seconds, skip_silent="skip-silent" in self.switches) if self.seconds else None


Action = Callable[[Call], Iterator[str]]


def saves(kind: Kind) -> Action:
    """Create the object, or change it where it exists already, as Contiv does; print its key."""

    def save(call: Call) -> Iterator[str]:
        key = kind.spell_key(call.given)
        call.client.request("POST", kind.path(key), body=_encode(call.given), wait=call.wait)
        yield f"{key}\n"

    return save


def removes(kind: Kind) -> Action:
    """Delete the object; print its key."""

    def remove(call: Call) -> Iterator[str]:
        key = kind.spell_key(call.given)
        call.client.request("DELETE", kind.path(key), wait=call.wait)
        yield f"{key}\n"

    return remove


def inspects(kind: Kind) -> Action:
    """Print the object's configuration and its state."""

    def inspect(call: Call) -> Iterator[str]:
        reply = call.client.request("GET", kind.inspect_path(kind.spell_key(call.given)))
        yield render.json_document(decode_json(reply))

    return inspect


def lists(kind: Kind) -> Action:
    """Print all objects of a tenant, or of all tenants; an unknown tenant is an error."""

    def list_(call: Call) -> Iterator[str]:
        tenant = "" if "all" in call.switches else str(call.given.get("tenantName", ""))
        rows = list(call.client.rows(kind.path(), query={"tenantName": tenant} if tenant else {}))
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
    """Print all nodes, each with how it is and how far it has come."""
    rows = list(call.client.rows(NODE.path(), query={}))
    if "quiet" in call.switches:
        yield render.names(NODE.name, rows)
    elif "json" in call.switches:
        yield render.json_array(rows)
    else:
        yield render.table(NODE.columns, ({**row, **_status(row), "state": _state(row)} for row in rows))


def settle(call: Call) -> Iterator[str]:
    """Wait until every node has carried out all that was written; print the revision that is in force."""
    wait = call.wait or Wait(DEFAULT_WAIT, skip_silent="skip-silent" in call.switches)
    settled = decode_row(call.client.request("POST", f"{API}/settle", wait=wait))
    yield f"{settled.get('revision', '')}\n"


def create_policy(call: Call) -> Iterator[str]:
    """Create a policy, or change whether it is a dry run."""
    given = {**call.given, "dryRun": True} if "dry-run" in call.switches else call.given
    yield from saves(POLICY)(call._replace(given=given))


def add_rule(call: Call) -> Iterator[str]:
    """Add a rule; members that the direction leaves without a meaning are refused before anything is sent."""
    direction = str(call.given["direction"])
    for member, flag in _NOT_FOR.get(direction, {}).items():
        if call.given.get(member):
            raise Usage(f"{flag} has no meaning in a rule with direction {direction}: leave it out")
    if "preview" in call.switches:
        yield from _preview(call, [{"put": RULE.plural, "object": dict(call.given)}])
    else:
        yield from saves(RULE)(call)


def remove_rule(call: Call) -> Iterator[str]:
    """Remove a rule, or show what that would change."""
    if "preview" in call.switches:
        yield from _preview(call, [{"delete": RULE.plural, "key": RULE.spell_key(call.given)}])
    else:
        yield from removes(RULE)(call)


def diff_policy(call: Call) -> Iterator[str]:
    """Print what the changes in a file would newly allow or block."""
    try:
        changes = json.loads(read_document(str(call.given["file"])))
    except ValueError as error:
        raise Usage(f"{call.given['file']}: not JSON: {error}") from error
    yield from _preview(call, changes)


def _preview(call: Call, changes: object) -> Iterator[str]:
    reply = call.client.request("POST", f"{API}/policydiff", body=_encode({"changes": changes}))
    rows = decode_rows(reply)
    if "json" in call.switches:
        yield render.json_array(rows)
    elif not rows:
        yield "nothing would be newly allowed or blocked\n"
    else:
        shown = ({**row, "verdict": "allowed" if row.get("allowed") else "blocked"} for row in rows)
        yield render.table(FLOW_CHANGES, shown)


def list_rules(call: Call) -> Iterator[str]:
    """Print the rules of a policy in two tables, the lowest priority first; an unknown policy is an error."""
    query = {"tenantName": str(call.given["tenantName"]), "policyName": str(call.given["policyName"])}
    rules = sorted(call.client.rows(RULE.path(), query=query), key=_priority)
    if not rules:
        call.client.request("GET", POLICY.path(POLICY.spell_key(call.given)))
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
    """Print the settings of the cluster and what is in use."""
    yield render.json_document(decode_json(call.client.request("GET", GLOBAL.inspect_path("global"))))


def set_global(call: Call) -> Iterator[str]:
    """Change the settings that were given and no others (W25), if nobody else changed them meanwhile."""
    if not call.given:
        raise Usage("nothing to set: give at least one option; see netctl global set --help")
    reply = call.client.request("GET", GLOBAL.path("global"))
    kept = {member: value for member, value in decode_row(reply).items() if member not in _ADDED_BY_SERVER}
    call.client.request(
        "PUT",
        GLOBAL.path("global"),
        body=_encode({**kept, **call.given}),
        if_match=reply.headers.get("etag", ""),
        wait=call.wait,
    )
    yield "global\n"


def show_version(call: Call) -> Iterator[str]:
    """Print the versions of netctl and of the netmaster; the first also when there is no netmaster."""
    yield f"Client version: {__version__}\n"
    server = decode_row(call.client.request("GET", "/version"))
    yield f"Server version: {server.get('Version', '')}\n"
    yield f"Server commit:  {server.get('GitCommit', '')}\n"
    yield f"Server built:   {server.get('BuildTime', '')}\n"


def backup(call: Call) -> Iterator[str]:
    """Write the whole state to a file, whole or not at all, or to the standard output."""
    document = call.client.request("GET", f"{API}/backup").body
    if path := str(call.given.get("file", "")):
        write_document(path, document)
        yield f"{path}\n"
    else:
        yield document.decode(errors="surrogateescape")


def restore(call: Call) -> Iterator[str]:
    """Put a backup in place of the netmaster's state."""
    document = read_document(str(call.given["file"]))
    query = {"force": "1"} if "force" in call.switches else {}
    reply = call.client.request("POST", f"{API}/restore", query=query, body=document, wait=call.wait)
    restored = decode_row(reply)
    yield f"restored {restored.get('restored', 0)} objects\n"


def forget_kubernetes(call: Call) -> Iterator[str]:
    """Have the netmaster forget what Kubernetes declared."""
    reply = call.client.request("DELETE", f"{API}/kubernetes", wait=call.wait)
    yield f"forgot {decode_row(reply).get('forgotten', 0)} documents\n"


def print_completion(call: Call) -> Iterator[str]:
    """Print a script that teaches a shell to complete netctl's words."""
    from weft.ctl.netctl.completion import completion_script  # noqa: PLC0415 - made from the table that names this action

    yield completion_script(str(call.given["shell"]))


def _encode(members: Mapping[str, object]) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()


def _status(node: Row) -> Row:
    status = node.get("status")
    return status if isinstance(status, dict) else {}


def _state(node: Row) -> str:
    since, status = node.get("silentSince"), _status(node)
    if isinstance(since, int | float) and since:
        return time.strftime("silent since %Y-%m-%d %H:%M:%S UTC", time.gmtime(since))
    state, reasons = status.get("state", "alive"), status.get("reasons")
    if state == "not ready" and isinstance(reasons, list):
        return f"not ready: {'; '.join(map(str, reasons))}"
    return str(state)


def _priority(rule: Row) -> int:
    priority = rule.get("priority")
    return priority if isinstance(priority, int) else 0
