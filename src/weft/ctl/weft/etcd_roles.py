"""`weft etcd-roles NODE …`: a user and a role in etcd for each agent that uses etcd directly (ADR 14).

It changes only users and roles named `weft-…`. It does not enable authentication in etcd.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from weft.domain.errors import Invalid
from weft.domain.ids import MAX_LONG_NAME, NodeName, StoreKey, check_name
from weft.domain.lifecycle.node_permissions import writable_keys
from weft.drivers import EtcdStoreSettings, open_shared_store
from weft.options import readable_file, secret_file
from weft.ports.store import StoreRoles
from weft.runtime.http_failover import is_exposed
from weft.runtime.settings import url_list

# Bytes of a generated password.
_PASSWORD_BYTES = 32
_MASTER = "weft-netmaster"


class Account(NamedTuple):
    """A user with a role of the same name, and the keys that it may write."""

    name: str
    writes: Sequence[StoreKey]


def node_account(node: NodeName) -> Account:
    return Account(f"weft-node-{node}", writable_keys(node))


def main(argv: Sequence[str]) -> int:
    """Create what is missing, correct what differs, and print what has changed."""
    args = _parser().parse_args(argv)
    nodes = [NodeName(check_name(each, field="NODE", limit=MAX_LONG_NAME)) for each in args.nodes]
    if not nodes and not args.netmaster:
        raise Invalid("give the names of nodes, or --netmaster")
    if exposed := [url for url in args.etcd_endpoints if is_exposed(url)]:
        raise Invalid(f"--etcd-endpoints: passwords would be sent in clear text to {exposed[0]}: use https://")
    settings = EtcdStoreSettings(
        endpoints=args.etcd_endpoints,
        root=args.root,
        user=args.etcd_user if args.etcd_password_file else "",
        password=args.etcd_password_file or "",
        **{name: str(getattr(args, f"etcd_{name}") or "") for name in ("ca", "cert", "key")},
    )
    # netmaster reads and writes everything below the root, and nothing else.
    accounts = [Account(_MASTER, (StoreKey(""),))] if args.netmaster else []
    accounts += [node_account(node) for node in nodes]
    args.password_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    asyncio.run(_put_accounts(settings, accounts, passwords=args.password_dir))
    print("They take effect while authentication is enabled in etcd: `etcdctl auth enable`, which this does not do.")
    return 0


async def _put_accounts(settings: EtcdStoreSettings, accounts: Sequence[Account], *, passwords: Path) -> None:
    async with open_shared_store(settings) as store:
        for account in accounts:
            changes = await _put_account(store.roles, account, file=passwords / account.name)
            print("\n".join(changes) if changes else f"{account.name}: unchanged")


async def _put_account(roles: StoreRoles, account: Account, *, file: Path) -> list[str]:
    changes = list(await roles.put_role(account.name, writes=account.writes))
    # On disk before etcd has it: nobody could use a user whose password was lost. An existing user keeps its own.
    password = "" if await roles.has_user(account.name) else _password(file)
    return [*changes, *await roles.put_user(account.name, password=password, role=account.name)]


def _password(file: Path) -> str:
    """The password in the file, which is created with a random one if there is none."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        # Left by an earlier run that did not come to create the user.
        return secret_file(str(file))
    password = secrets.token_urlsafe(_PASSWORD_BYTES)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(f"{password}\n")
        stream.flush()
        os.fsync(descriptor)
    print(f"password of the new user in {file}", file=sys.stderr)
    return password


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft etcd-roles",
        description="Create users and roles in etcd, so that an agent that uses etcd directly writes only the keys of "
        "its node and those of endpoints, address claims and blocks. Repeat it after an update of Weft.",
    )
    parser.add_argument("nodes", nargs="*", metavar="NODE", help="names of nodes, as of netplugin --host")
    parser.add_argument("--netmaster", action="store_true", help=f"also {_MASTER}, which writes all keys of Weft")
    parser.add_argument(
        "--password-dir", type=Path, required=True, metavar="DIR",
        help="where passwords of new users are put, each in a file named after its user; for --etcd-password-file",
    )  # fmt: skip
    parser.add_argument(
        "--etcd-endpoints", type=url_list, required=True, metavar="URLS", help="comma-separated etcd URLs"
    )
    parser.add_argument("--etcd-user", default="root", help="who may change users and roles (root)")
    parser.add_argument("--etcd-password-file", type=secret_file, metavar="FILE", help="its password")
    for name, what in (("ca", "CA of etcd's certificates"), ("cert", "client certificate"), ("key", "its key")):
        parser.add_argument(f"--etcd-{name}", type=readable_file, metavar="FILE", help=what)
    # For tests: netmaster and netplugin have no such setting.
    parser.add_argument("--root", default="/weft/", help=argparse.SUPPRESS)
    return parser
