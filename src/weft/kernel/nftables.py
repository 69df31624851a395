"""Chains, sets and rules of a namespace in nft syntax: through libnftables in this process, or the `nft` program.

One `run` is one transaction. For elements of sets and maps use `netlink.nft_set`, which is several times faster.
Reading returns the JSON objects of libnftables-json(5).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Any, Self

import msgspec

from weft.domain.errors import DatapathFault
from weft.kernel.netns import Namespace

_LIBRARY = "libnftables.so.1"
_PROGRAM = "nft"
_PROGRAM_DEADLINE = 30.0
_MAX_ERROR_TEXT = 2000


class Output(Enum):
    """Output flags of libnftables: none, JSON, or JSON without set elements (terse)."""

    NONE = 0
    WHOLE = 1 << 4
    TERSE = 1 << 4 | 1 << 11


class Nftables(ABC):
    """Access to the ruleset of one network namespace, for one thread at a time. Close it at the end."""

    # Committed transactions: compared with the kernel's generation to detect changes by other processes.
    transactions = 0

    def run(self, commands: str) -> None:
        """Apply all of the commands, or none; `DatapathFault` carries nft's own error text."""
        self._execute(commands, Output.NONE)
        self.transactions += 1

    def read(self, command: str, *, elements: bool = True) -> Sequence[Mapping[str, Any]]:
        """Run a `list` command: return an object for each table, chain, rule and set, with its elements or without."""
        document = msgspec.json.decode(self._execute(command, Output.WHOLE if elements else Output.TERSE))
        return [item for item in document["nftables"] if "metainfo" not in item]

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _execute(self, commands: str, output: Output) -> bytes: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class NftablesLibrary(Nftables):
    """A libnftables context. Its socket belongs to the namespace of the thread that creates it."""

    def __init__(self, library: ctypes.CDLL, *, namespace: Namespace) -> None:
        self._library = _declare(library)
        self._name = namespace.name
        self._context = namespace.run(lambda: library.nft_ctx_new(0))
        if self._context is None:
            raise DatapathFault(f"nftables in {self._name}: cannot create a libnftables context")
        if library.nft_ctx_buffer_output(self._context) or library.nft_ctx_buffer_error(self._context):
            self.close()
            raise DatapathFault(f"nftables in {self._name}: libnftables is out of memory")

    def close(self) -> None:
        self._library.nft_ctx_free(self._context)

    def _execute(self, commands: str, output: Output) -> bytes:
        # With JSON output the library also tries to parse its input as JSON first: set the flag only for reading.
        self._library.nft_ctx_output_set_flags(self._context, output.value)
        if self._library.nft_run_cmd_from_buffer(self._context, commands.encode()) != 0:
            raise _fault(self._name, self._library.nft_ctx_get_error_buffer(self._context))
        reply: bytes = self._library.nft_ctx_get_output_buffer(self._context)
        return reply


class NftablesProgram(Nftables):
    """The `nft` program, run inside the namespace for each call: the fallback where the library is missing."""

    def __init__(self, program: str, *, namespace: Namespace) -> None:
        self._program = program
        self._namespace = namespace

    def close(self) -> None:
        """Nothing is held between calls."""

    def _execute(self, commands: str, output: Output) -> bytes:
        # With --json, nft parses a file as JSON; a command given as an argument is always nft syntax.
        flags = ["--json", *(["--terse"] if output is Output.TERSE else [])]
        command = [self._program, "--file", "-"] if output is Output.NONE else [self._program, *flags, commands]
        name = self._namespace.name
        try:
            done = self._namespace.run(
                lambda: subprocess.run(  # noqa: S603  no shell, and the path is the one that was looked up
                    command, input=commands.encode(), capture_output=True, timeout=_PROGRAM_DEADLINE, check=False
                )
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DatapathFault(f"nftables in {name}: {error}") from error
        if done.returncode != 0:
            raise _fault(name, done.stderr)
        return done.stdout


def open_nftables(namespace: Namespace) -> Nftables:
    """Use the library where there is one, else the program; `DatapathFault` when there is neither.

    The program needs the namespace to stay open.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        program = shutil.which(_PROGRAM)
        if program is None:
            raise DatapathFault(f"nftables: neither {_LIBRARY} nor the program {_PROGRAM} is installed") from error
        return NftablesProgram(program, namespace=namespace)
    return NftablesLibrary(library, namespace=namespace)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the prototypes of the functions we use (`nftables/libnftables.h`)."""
    context = ctypes.c_void_p
    library.nft_ctx_new.argtypes, library.nft_ctx_new.restype = (ctypes.c_uint32,), context
    for name in ("nft_ctx_buffer_output", "nft_ctx_buffer_error"):
        getattr(library, name).argtypes = (context,)
    for name in ("nft_ctx_get_output_buffer", "nft_ctx_get_error_buffer"):
        function = getattr(library, name)
        function.argtypes, function.restype = (context,), ctypes.c_char_p
    library.nft_ctx_output_set_flags.argtypes, library.nft_ctx_output_set_flags.restype = (context, ctypes.c_uint), None
    library.nft_run_cmd_from_buffer.argtypes = (context, ctypes.c_char_p)
    library.nft_ctx_free.argtypes, library.nft_ctx_free.restype = (context,), None
    return library


def _fault(name: str, stderr: bytes) -> DatapathFault:
    text = stderr.decode(errors="replace").strip()
    return DatapathFault(f"nftables in {name}: {text[:_MAX_ERROR_TEXT]}")
