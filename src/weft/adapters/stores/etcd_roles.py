"""Users and roles in etcd (ADR 14). Existence is read, not told from error texts; etcd has one order for all of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weft.adapters.stores import etcd_wire as wire
from weft.adapters.stores.etcd_gateway import Gateway
from weft.domain.ids import StoreKey

_done = msgspec.json.Decoder(wire.Done, strict=False)
_names = msgspec.json.Decoder(wire.Names, strict=False)
_role = msgspec.json.Decoder(wire.RoleAnswer, strict=False)

_NOTHING = wire.Nothing()


class EtcdRoles:
    """See `ports.store.StoreRoles`. Works before authentication is enabled in etcd, and as root after it."""

    def __init__(self, gateway: Gateway, root: bytes) -> None:
        self._gateway = gateway
        self._root = root

    async def put_role(self, name: str, *, writes: Sequence[StoreKey]) -> Sequence[str]:
        wanted = {self._permission("READ", StoreKey("")), *(self._permission("WRITE", key) for key in writes)}
        # etcd has one permission for a range: to read and write everything is a type of its own.
        if StoreKey("") in writes:
            wanted = {self._permission("READWRITE", StoreKey(""))}
        changes = []
        if name not in (await self._gateway.call("/v3/auth/role/list", _NOTHING, _names, repeatable=True)).roles:
            await self._change("role/add", wire.Named(name=name))
            changes.append(f"created role {name}")
        present = set(
            (await self._gateway.call("/v3/auth/role/get", wire.RoleRead(role=name), _role, repeatable=True)).perm
        )
        # First granted, so that a running agent keeps what it had all the time. Granting replaces the type of a range.
        for permission in sorted(wanted - present, key=_range):
            await self._change("role/grant", wire.RoleGrant(name=name, perm=permission))
            changes.append(f"granted {name} {_text(permission)}")
        kept = set(map(_range, wanted))
        for permission in sorted(present - wanted, key=_range):
            if _range(permission) not in kept:
                revoked = wire.RoleRevoke(role=name, key=permission.key, range_end=permission.range_end)
                await self._change("role/revoke", revoked)
                changes.append(f"revoked from {name} {_text(permission)}")
        return changes

    async def has_user(self, name: str) -> bool:
        return name in (await self._gateway.call("/v3/auth/user/list", _NOTHING, _names, repeatable=True)).users

    async def put_user(self, name: str, *, password: str, role: str) -> Sequence[str]:
        changes = []
        if not await self.has_user(name):
            await self._change("user/add", wire.UserAdd(name=name, password=password))
            changes.append(f"created user {name}")
        known = await self._gateway.call("/v3/auth/user/get", wire.Named(name=name), _names, repeatable=True)
        if role not in known.roles:
            await self._change("user/grant", wire.UserGrant(user=name, role=role))
            changes.append(f"granted user {name} role {role}")
        return changes

    async def _change(self, path: str, request: wire.Request) -> None:
        await self._gateway.call(f"/v3/auth/{path}", request, _done, repeatable=False)

    def _permission(self, kind: wire.PermissionType, key: StoreKey) -> wire.Permission:
        first = self._root + key.encode()
        is_prefix = not key or key.endswith("/")
        # The first key after the prefix, as in `etcd.py`.
        end = first[:-1] + bytes([first[-1] + 1]) if is_prefix else b""
        return wire.Permission(key=first, range_end=end, permType=kind)


def _range(permission: wire.Permission) -> tuple[bytes, bytes]:
    return permission.key, permission.range_end


def _text(permission: wire.Permission) -> str:
    more = "*" if permission.range_end else ""
    return f"{permission.permType} {permission.key.decode(errors='backslashreplace')}{more}"
