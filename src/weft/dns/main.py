"""The command `netdns`: read settings, load the cached zones, serve the control socket.

It needs no agent to keep answering, and no cached zones to start.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys

from weft import __version__
from weft.dns.control import Tenants, serve_control_socket
from weft.dns.settings import DnsSettings, read_dns_settings
from weft.dns.tenant_sockets import TenantNetnsSockets
from weft.dns.upstream import Upstreams
from weft.dns.zone_cache import ZoneCache
from weft.domain.errors import WeftError
from weft.runtime.logs import Log, start_logging
from weft.runtime.settings import BadSettings, refuse

log = Log("dns")

EXIT_FAILED = 1


def _allow_all_files() -> None:
    """Raise the soft limit of open files to the hard one: 1,024 would let one tenant take the sockets of all."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(settings: DnsSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    # Only root reads it: the zone cache has the names and addresses of all tenants.
    settings.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    zone_cache = ZoneCache(settings.run_dir / "zones")
    async with asyncio.TaskGroup() as tasks:
        tenants = Tenants(
            sockets=TenantNetnsSockets(settings.run_dir / "netns", datapath=settings.datapath),
            upstreams=Upstreams(settings.upstreams, file=settings.resolv_conf),
            zone_cache=zone_cache,
            tasks=tasks,
            domain=settings.domain,
            ttl=settings.ttl,
        )
        await tenants.load_zones()
        async with serve_control_socket(settings.socket, tenants):
            log.info("netdns started", version=__version__)
            await stop.wait()
            log.info("netdns stopping")
        await tenants.close()
    zone_cache.close()


def main() -> None:
    """The command `netdns`."""
    try:
        settings = read_dns_settings(sys.argv[1:], os.environ)
    except BadSettings as error:
        refuse("netdns", error)
    start_logging(level=settings.log_level, as_json=settings.json_log, syslog=None)
    _allow_all_files()
    try:
        asyncio.run(serve(settings))
    except (WeftError, OSError) as error:
        log.error("netdns cannot run", reason=str(error))
        raise SystemExit(EXIT_FAILED) from error


if __name__ == "__main__":
    main()
