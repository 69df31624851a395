"""Generates the reference pages of objects and REST from the code: `python -m weft.master.api.reference PAGE`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from weft.domain import kinds
from weft.domain.field_docs import MEMBERS
from weft.domain.kinds import Kind
from weft.drivers import MemoryStoreSettings, open_store
from weft.master.main import Netmaster
from weft.master.settings import read_master_settings
from weft.runtime.http import STATUSES
from weft.runtime.routes import Route

_OBJECTS = """\
# Objects

The objects that netmaster stores, with Contiv's member names. `make docs` generates this page from the code; a test
keeps it up to date. JSON omits zero values (0, "", empty lists). The control plane sets members marked *read-only*;
they are rejected in input. Every response also has `key`, `links` and `link-sets`, which are ignored in input. Unknown
members are rejected.
"""

_REST = """\
# REST

netmaster's routes, with or without a trailing slash. `make docs` generates this page from the code; a test keeps it up
to date. `/openapi.json` is the machine-readable form.

- `POST` and `PUT` create or change the object; they are idempotent. `{key}` is the key members, joined by colons.
- Reading one object returns its `ETag`. Writes honour `If-Match: "REVISION"` (or `*`) and `If-None-Match: *`.
- Lists take `limit` and `continue` (the `X-Continue` header of the previous page), any member as a filter, and `watch`:
  one JSON object per line, `put` and `delete` with the revision, `synced` after the first listing; `since=REVISION`
  resumes from there.
- A write with `wait=SECONDS` (up to 60) returns when every node has applied it, else 504 `behind`: the write is
  committed, and `details.pendingNodes` has the nodes that have not acknowledged it, each with its `state` (`Ready`,
  `NotReady`, `Unreachable`), `appliedRevision`, `lag` and `reasons`. With `ignore-unreachable=1`, unreachable nodes are
  not waited for. `POST /api/v1/sync` waits for everything written before. Nodes show the same four members as `status`:
  `lag` is the number of revisions between the node's applied revision and the last sync request.
- An error is `{"code", "message", "field", "details"}` with one of these statuses:
"""


def objects_reference() -> str:
    """The page `objects.md`."""
    return "\n".join((_OBJECTS, *(line for kind in kinds.ALL for line in _object_lines(kind))))


def _object_lines(kind: Kind[Any]) -> Iterator[str]:
    yield f"## {kind.name}\n"
    yield f"{(kind.type.__doc__ or '').strip()}\n"
    yield f"REST: `/api/v1/{kind.plural}/{{key}}`, key `{':'.join(kind.key_members())}`. Store: `{kind.prefix}/…`.\n"
    yield "| member | type | default | meaning |"
    yield "|---|---|---|---|"
    hints = get_type_hints(kind.type)
    for field in msgspec.structs.fields(kind.type):
        default = "required" if field.required else _default(field.default)
        read_only = "*read-only* " if field.encode_name in kind.read_only_fields else ""
        about = MEMBERS[kind.name][field.encode_name].removeprefix("read-only: ")
        yield f"| `{field.encode_name}` | {_type(hints[field.name])} | {default} | {read_only}{about} |"
    yield ""


def _default(value: object) -> str:
    return f"`{value}`" if value and value is not msgspec.NODEFAULT else ""


def _type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(f"`{word}`" for word in get_args(hint) if word)
    origin = get_origin(hint)
    if origin is tuple:
        return "list of strings"
    if origin is dict:
        return "map of strings"
    base = getattr(hint, "__supertype__", hint)  # a NewType, such as TenantName, is documented as its base
    return {str: "string", int: "integer", bool: "boolean", float: "number"}.get(base, "object")


def rest_reference() -> str:
    """The page `rest.md`."""
    netmaster = Netmaster(read_master_settings([], {}), open_store(MemoryStoreSettings()))
    statuses = sorted({(status, error.__name__, (error.__doc__ or "").strip()) for error, status in STATUSES})
    lines = [_REST, "| status | error | when |", "|---|---|---|"]
    lines += [f"| {status} | {name} | {about} |" for status, name, about in statuses]
    # Routes come grouped by section already, so `groupby` needs no sort.
    for title, routes in groupby(netmaster.routes(), key=_section):
        lines += [f"\n## {title}\n", "| method | path | description |", "|---|---|---|"]
        lines += [f"| {route.method} | `{route.path.rstrip('/')}` | {route.about} |" for route in routes]
    return "\n".join(lines) + "\n"


def _section(route: Route) -> str:
    parts = route.path.strip("/").split("/")
    if parts[:2] == ["api", "v1"]:
        return parts[3] if parts[2] == "inspect" else parts[2]
    return {"plugin": "Plugin API", "debug": "Forced cleanup"}.get(parts[0], "netmaster")


PAGES = {"objects": objects_reference, "rest": rest_reference}

if __name__ == "__main__":
    sys.stdout.write(PAGES[sys.argv[1]]())
