"""Structured logging: an event and its fields, as text or JSON, to stderr or syslog."""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import urlsplit

import msgspec

from weft.runtime.syslog import SyslogHandler

LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING, "ERROR": logging.ERROR}
# The attribute of a LogRecord that carries our fields.
_FIELDS = "weft_fields"


class Log:
    """A logger whose calls take an event name and fields: `log.info("endpoint attached", endpoint=key, took_ms=4)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"weft.{name}")

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields)

    def failure(self, event: str, **fields: Any) -> None:
        """An unexpected exception with its traceback; only for the outermost loop of a program."""
        self._logger.error(event, extra={_FIELDS: fields}, exc_info=True)

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields})


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, _FIELDS, {})
        tail = "".join(f" {name}={_quoted(value)}" for name, value in fields.items())
        time = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        line = f"{time}.{int(record.msecs):03d} {record.levelname.lower()} {record.getMessage()}{tail}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


# A value with spaces or control characters could look like other fields or lines.
def _quoted(value: Any) -> str:
    text = str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def read_syslog_url(text: str) -> tuple[str, str, int]:
    """`udp://127.0.0.1:514` or `tcp://…` -> (protocol, host, port)."""
    parts = urlsplit(text)
    if parts.scheme not in {"udp", "tcp"} or not parts.hostname or not parts.port:
        raise ValueError(f"{text!r} is not a syslog address such as udp://127.0.0.1:514")
    return parts.scheme, parts.hostname, parts.port


def dropped_records() -> int:
    """Records of this process that its syslog server did not get."""
    # The handlers of a process are global, as `start_logging` makes them.
    handlers = logging.getLogger().handlers
    return sum(handler.dropped for handler in handlers if isinstance(handler, SyslogHandler))


def start_logging(*, level: str, as_json: bool, syslog: tuple[str, str, int] | None) -> None:
    """Set up the process's logging; called once, by `main`."""
    handler: logging.Handler
    handler = SyslogHandler(*syslog) if syslog else logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    # logging would look these up for each record, and no format of ours shows them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=LEVELS[level], handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    # Its access log is disabled; the rest is noise below warnings.
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
