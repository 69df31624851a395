"""The lower bound for REST: a bare handler that does one commit of the same size.

`python -m bench.floor PORT etcd URL` or `python -m bench.floor PORT sqlite PATH`.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import msgspec
from aiohttp import web

from weft.domain.ids import StoreKey
from weft.drivers import EtcdStoreSettings, SqliteStoreSettings, StoreSettings, open_store
from weft.ports.store import NEVER, Put, RevisionEquals, Store

VALUE = b'{"v":1,"o":{"%s"}}' % (b"x" * 300)
CLAIM = b'{"v":1,"o":{"holder":"endpoint:default:bench:floor"}}'


async def same_commit(store: Store, number: int) -> None:
    """The commit of an endpoint creation: absent document and claim, unchanged network, group and block; two writes."""
    document, claim = StoreKey(f"endpoints/default/bench/f{number}"), StoreKey(f"claims/addresses/d/b/{number:08x}")
    unchanged = [
        RevisionEquals(StoreKey(f"floor/{name}"), NEVER) for name in ("network", "group", "block", "leader", "restore")
    ]
    await store.commit(
        [RevisionEquals(document, NEVER), RevisionEquals(claim, NEVER), *unchanged],
        [Put(document, VALUE), Put(claim, CLAIM)],
    )


async def serve(port: int, settings: StoreSettings) -> None:
    numbers = itertools.count()
    async with open_store(settings) as store:

        async def handler(request: web.Request) -> web.Response:
            msgspec.json.decode(await request.read())
            await same_commit(store, next(numbers))
            return web.Response(body=b"{}", content_type="application/json")

        app = web.Application()
        app.router.add_post("/floor", handler)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    _, port_text, kind, where = sys.argv
    chosen: StoreSettings = (
        EtcdStoreSettings(endpoints=(where,), root="/floor/") if kind == "etcd" else SqliteStoreSettings(path=where)
    )
    asyncio.run(serve(int(port_text), chosen))
