"""The reference of objects and of REST in Markdown, written from the code: `python -m weft.master.api.reference PAGE`."""

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

What netmaster keeps, with Contiv's member names. This page is made from the code by `make docs`; a test keeps it up to
date. Zero values (0, "", empty lists) are left out of JSON. Members marked *given* are added by the control plane and
refused in input. Every answer also carries `key`, `links` and `link-sets`, which are ignored in input. Unknown members
are refused.
"""

_REST = """\
# REST

netmaster's routes, with or without a trailing slash. This page is made from the code by `make docs`; a test keeps it up
to date. `/openapi.json` says the same to programs.

- `POST` and `PUT` create the object or change it; asking for what is there already changes nothing. `{key}` is made of
  the key members, joined by colons.
- Reading one object gives its `ETag`; `If-Match: "REVISION"` (or `*`) and `If-None-Match: *` are honoured by writes.
- Lists take `limit` and `continue` (the `X-Continue` header of the page before), any member as a filter, and `watch`:
  one JSON object a line, `put` and `delete` with the revision, `synced` after the first listing; `since=REVISION` goes
  on from there.
- A write with `wait=SECONDS` (up to 60) answers when it is in force on every node, else 504 `behind`: it was written
  and stands, and `details.laggards` has the nodes that have not said so, each with its `state` (`alive`, `not ready`,
  `silent`), `realisedRevision`, `lag` and `reasons`. `skip-silent=1` leaves silent nodes out. `POST /api/v1/settle`
  waits for all that was written before. Nodes show the same four members as `status`: `lag` is by how many revisions a
  node is behind the last such question.
- A refusal is `{"code", "message", "field", "details"}` with one of these statuses:
"""


def objects_reference() -> str:
    """The page of all objects."""
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
        given = "*given* " if field.encode_name in kind.given else ""
        about = MEMBERS[kind.name][field.encode_name].removeprefix("given: ")
        yield f"| `{field.encode_name}` | {_type(hints[field.name])} | {default} | {given}{about} |"
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
    base = getattr(hint, "__supertype__", hint)
    return {str: "string", int: "integer", bool: "boolean", float: "number"}.get(base, "object")


def rest_reference() -> str:
    """The page of all routes."""
    netmaster = Netmaster(read_master_settings([], {}), open_store(MemoryStoreSettings()))
    statuses = sorted({(status, error.__name__, (error.__doc__ or "").strip()) for error, status in STATUSES})
    lines = [_REST, "| status | error | when |", "|---|---|---|"]
    lines += [f"| {status} | {name} | {about} |" for status, name, about in statuses]
    for title, routes in groupby(netmaster.routes(), key=_section):
        lines += [f"\n## {title}\n", "| method | path | what it does |", "|---|---|---|"]
        lines += [f"| {route.method} | `{route.path.rstrip('/')}` | {route.about} |" for route in routes]
    return "\n".join(lines) + "\n"


def _section(route: Route) -> str:
    parts = route.path.strip("/").split("/")
    if parts[:2] == ["api", "v1"]:
        return parts[3] if parts[2] == "inspect" else parts[2]
    return {"plugin": "Calls of the plugins", "debug": "Forced clean-up"}.get(parts[0], "About netmaster")


PAGES = {"objects": objects_reference, "rest": rest_reference}

if __name__ == "__main__":
    sys.stdout.write(PAGES[sys.argv[1]]())
