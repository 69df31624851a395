"""A syslog server that stops reading, or goes away, stops nothing; what is lost is counted."""

from __future__ import annotations

import logging
import socket
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager

from prometheus_client import CollectorRegistry

from weft.lab.servers.processes import free_port
from weft.lab.waiting import DEADLINE, until
from weft.runtime import syslog
from weft.runtime.admission import AdmissionMetrics
from weft.runtime.syslog import SyslogHandler


@contextmanager
def logging_to(kind: str, port: int) -> Iterator[tuple[logging.Logger, SyslogHandler]]:
    """A logger with nothing but this handler."""
    with closing(SyslogHandler(kind, "127.0.0.1", port)) as handler:
        logger = logging.Logger("test")
        logger.addHandler(handler)
        yield logger, handler


def listen(port: int) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port))
    listener.settimeout(DEADLINE)
    return listener


def lines_of(listener: socket.socket) -> Generator[str, None, None]:
    """The lines of the next connection."""
    connection, _ = listener.accept()
    connection.settimeout(DEADLINE)
    with connection, connection.makefile() as lines:
        yield from (line.rstrip("\n") for line in lines)


async def test_a_server_that_stops_reading_stops_nobody() -> None:
    """It was the event loop that waited in send()."""
    port = free_port()
    with listen(port), logging_to("tcp", port) as (logger, handler):
        # Far more than socket buffers and the queue hold; without the thread this never ends.
        for _ in range(64):
            logger.error("x" * 200_000)
        await until(lambda: handler.dropped > 0)
        assert sum(map(len, handler._waiting)) <= syslog.MAX_WAITING


def test_a_broken_connection_is_made_again() -> None:
    port = free_port()
    with listen(port) as listener, logging_to("tcp", port) as (logger, _):
        logger.error("first")
        first = lines_of(listener)
        assert next(first) == "<11>first"
        first.close()
        logger.warning("second\nline")
        assert next(lines_of(listener)) == "<12>second\\nline"


def test_a_server_that_comes_later_gets_what_was_logged_before_and_how_much_is_missing() -> None:
    port = free_port()
    with logging_to("tcp", port) as (logger, handler):
        for number in range(20):
            logger.info("%d %s", number, "x" * 100_000)
        with listen(port) as listener:
            lines = lines_of(listener)
            assert next(lines).startswith("<14>")
            told = next(line for line in lines if "dropped" in line)
            assert told == f"<12>log records dropped count={handler.dropped}"


def test_a_metric_counts_what_was_dropped() -> None:
    registry, root = CollectorRegistry(), logging.getLogger()
    registry.register(AdmissionMetrics())
    assert registry.get_sample_value("weft_log_records_dropped_total") == 0
    with logging_to("tcp", free_port()) as (logger, handler):
        root.addHandler(handler)
        try:
            for _ in range(20):
                logger.info("x" * 100_000)
            assert handler.dropped > 0
            assert registry.get_sample_value("weft_log_records_dropped_total") == handler.dropped
        finally:
            root.removeHandler(handler)


def test_udp() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(DEADLINE)
        with logging_to("udp", server.getsockname()[1]) as (logger, _):
            logger.error("hello")
            assert server.recv(100) == b"<11>hello"
