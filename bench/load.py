"""A cheap load generator: prebuilt requests on keep-alive connections, in a separate process.

`python -m bench.load PORT PATH FIRST COUNT CONNECTIONS` posts COUNT bodies, read as a template from standard input with
`%d` for the number, and prints the seconds it took. A status other than 200 is an error.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator


def main(port: int, path: str, first: int, count: int, connections: int) -> float:
    template = sys.stdin.read()
    requests = iter([_request(path, template % number) for number in range(first, first + count)])
    return asyncio.run(_drive(port, requests, connections))


def _request(path: str, body: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body.encode()


async def _drive(port: int, requests: Iterator[bytes], connections: int) -> float:
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(connections)]
    began = time.perf_counter()
    await asyncio.gather(*(_work(reader, writer, requests) for reader, writer in opened))
    took = time.perf_counter() - began
    for _, writer in opened:
        writer.close()
    return took


async def _work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: Iterator[bytes]) -> None:
    for request in requests:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise SystemExit(f"bench.load: {head.splitlines()[0].decode()}: {body[:300].decode()}")


if __name__ == "__main__":
    _, port_text, where, *numbers = sys.argv
    print(main(int(port_text), where, *map(int, numbers)))
