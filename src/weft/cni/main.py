#!/usr/bin/python3 -IS
"""weft-cni, the program that a container runtime executes: sends the call to the weft agent and prints its answer.

It must start fast, so it is one file that imports built-in modules only (no `__future__` either: that is a module to
load). Its twin in C is shim.c; docs/design/cni-wire.md is the contract of both.
"""

import _socket
import posix
import select
import sys
import time

SOCKET = b"/run/weft/cni.sock"
LOG = b"/var/log/contivk8s.log"
DEADLINE_MS = 60_000
LOG_LIMIT = 50 * 1024 * 1024
MAX_STDIN = 16 * 1024 * 1024
MAX_BODY = 24 * 1024 * 1024  # stdin and environment; the kernel limits the environment to 6 MiB
MAGIC = b"WFT1"
CHUNK = 65_536
PIPE_CHUNK = 4_096  # a pipe that polls as writable takes this much without blocking
VERSION_TIMEOUT = 1.0  # seconds: VERSION must not hang on a stdin that is never closed
OUTPUT_TIMEOUT = 5.0
SUPPORTED = b'"0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"'
ABOUT = (
    b"weft-cni: the CNI plugin of weft (wire WFT1). A container runtime calls it.\nCNI versions: " + SUPPORTED + b"\n"
)

# A translation table: bytes that are not printable ASCII become question marks.
PRINTABLE = b"?" * 32 + bytes(range(32, 127)) + b"?" * 129

# Codes of the CNI specification.
TRY_LATER, UNAVAILABLE, IO_FAILURE, NOT_DECODED = 11, 50, 5, 6


class Failure(Exception):
    """An error of the shim itself: code, message and details."""


def main() -> int:
    """Serve one call; returns the exit code."""
    started = time.monotonic()
    environment = posix.environ
    command = environment.get(b"CNI_COMMAND", b"")
    if not command:
        posix.write(2, ABOUT)
        return 0
    if command == b"VERSION":
        config, _ = read_stdin(started + VERSION_TIMEOUT)
        version = requested_version(config) or b"1.1.0"
        code, stdout = 0, b'{"cniVersion":"%b","supportedVersions":[%b]}\n' % (version, SUPPORTED)
    else:
        code, stdout = call_agent(command, started)
    # A result that the runtime did not receive is a failure: it must not take the container for attached.
    if not write_stdout(stdout):
        code = 1
    log(command, code, stdout, round((time.monotonic() - started) * 1000))
    return code


def call_agent(command: bytes, started: float) -> tuple[int, bytes]:
    """The agent's answer, or an error of our own: an exit code and all of stdout."""
    text = posix.environ.get(b"WEFT_CNI_DEADLINE_MS", b"")
    within = (int(text) if text.isdigit() and len(text) < 8 else 0) or DEADLINE_MS
    until = started + within / 1000
    config, failure = read_stdin(until)
    try:
        if failure:
            raise failure
        return exchange(config, until, within)
    except Failure as raised:
        code, message, details = raised.args
    # The specification has a code of its own for "the plugin is not available", for STATUS only.
    if code == TRY_LATER and command == b"STATUS":
        code = UNAVAILABLE
    version = requested_version(config) or b"0.1.0"
    details = clean(details, 512).replace(b'"', b"?").replace(b"\\", b"?")
    return 1, b'{"cniVersion":"%b","code":%d,"msg":"%b","details":"%b"}\n' % (version, code, message, details)


def read_stdin(until: float) -> tuple[bytes, Failure | None]:
    """The bytes of stdin, and the failure if they are not complete."""
    readable = select.poll()
    readable.register(0, select.POLLIN)
    data = bytearray()
    try:
        while readable.poll(max(0, until - time.monotonic()) * 1000):
            chunk = posix.read(0, CHUNK)
            if not chunk:
                return bytes(data), None
            data += chunk
            if len(data) > MAX_STDIN:
                return b"", Failure(NOT_DECODED, b"the network configuration is too large", b"16 MiB is the limit")
    except OSError as error:
        return b"", Failure(IO_FAILURE, b"stdin could not be read", reason(error))
    return bytes(data), Failure(IO_FAILURE, b"stdin could not be read", b"it did not end before the deadline")


def exchange(config: bytes, until: float, within: int) -> tuple[int, bytes]:
    """Send one frame to the agent and receive one."""
    path = posix.environ.get(b"WEFT_CNI_SOCKET") or SOCKET
    late = Failure(
        TRY_LATER, b"the weft agent did not answer in time", b"no answer from %b within %d ms" % (path, within)
    )
    variables = b"".join(b"%b=%b\0" % pair for pair in posix.environ.items() if pair[0].startswith(b"CNI_"))
    agent = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    left = max(1, round((until - time.monotonic()) * 1000))
    try:
        # connect(2) on a unix socket waits for room in the backlog of the agent, and that wait is bounded only by
        # SO_SNDTIMEO of a blocking socket.
        agent.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, timeval(left))
        agent.connect(path)
    except BlockingIOError:
        raise late from None
    except OSError as error:
        details = b"connecting to %b: %b" % (path, reason(error))
        raise Failure(TRY_LATER, b"the weft agent is unreachable", details) from error
    body = number(left) + number(len(variables)) + variables + config
    try:
        agent.settimeout(left / 1000)
        agent.sendall(MAGIC + number(len(body)) + body)
        size = int.from_bytes(receive(agent, 8, until).removeprefix(MAGIC), "big")
        if not 0 < size <= MAX_BODY:
            raise ConnectionError
        answer = receive(agent, size, until)
    except TimeoutError:
        raise late from None
    except OSError as error:
        raise Failure(TRY_LATER, b"the weft agent closed the connection", b"incomplete answer from " + path) from error
    return answer[0], answer[1:]


def receive(agent: _socket.socket, size: int, until: float) -> bytes:
    """Receive exactly `size` bytes."""
    data = bytearray()
    while len(data) < size:
        agent.settimeout(max(0.001, until - time.monotonic()))
        chunk = agent.recv(min(size - len(data), CHUNK))
        if not chunk:
            raise ConnectionError
        data += chunk
    return bytes(data)


def requested_version(config: bytes) -> bytes:
    """The value of the outermost `cniVersion`, or nothing. Errors need it too, so `config` may be broken JSON."""
    # Importing `json` would take longer than all the rest. Odd pieces are strings, even pieces are what is between.
    pieces = config.split(b'"')
    found = key = b""
    depth = at = 0
    while at + 1 < len(pieces):
        between = pieces[at].strip(b" \t\r\n")
        depth += between.count(b"{") + between.count(b"[") - between.count(b"}") - between.count(b"]")
        text = pieces[at + 1]
        at += 2
        while (len(text) - len(text.rstrip(b"\\"))) % 2 and at < len(pieces):  # the quote was escaped
            text += b'"' + pieces[at]
            at += 1
        if key == b"cniVersion" and between == b":" and depth == 1:
            found = text
        key = text
    fit = 0 < len(found) <= 32 and not found.strip(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.+-")
    return found if fit else b""


def write_stdout(stdout: bytes) -> bool:
    """Print the answer; whether the runtime read all of it in time."""
    until = time.monotonic() + OUTPUT_TIMEOUT
    writable = select.poll()
    writable.register(1, select.POLLOUT)
    try:
        while stdout:
            if not writable.poll(max(0, until - time.monotonic()) * 1000):
                return False
            stdout = stdout[posix.write(1, stdout[:PIPE_CHUNK]) :]
    except OSError:
        return False
    return True


def log(command: bytes, code: int, stdout: bytes, took: int) -> None:
    """Append one line about the call. A log that cannot be written must not fail the call."""
    path = posix.environ.get(b"WEFT_CNI_LOG", LOG)
    now = time.time()
    names = {b"container": b"CNI_CONTAINERID", b"ifname": b"CNI_IFNAME", b"netns": b"CNI_NETNS", b"args": b"CNI_ARGS"}
    fields = [b"%b=%b" % (name, word(posix.environ.get(variable, b""))) for name, variable in names.items()]
    line = b"%b.%03dZ pid=%d command=%b %b exit=%d took_ms=%d answer=%b\n" % (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)).encode(),
        int(now * 1000) % 1000,
        posix.getpid(),
        word(command),
        b" ".join(fields),
        code,
        took,
        clean(stdout.rstrip(), 1_024) or b"-",
    )
    try:
        posix.write(open_log(path), line)
    except OSError:
        return


def open_log(path: bytes) -> int:
    """Open the log, rotated when it is full. Of many processes one rotates; the others keep the file they have."""
    flags = posix.O_WRONLY | posix.O_APPEND | posix.O_CREAT | posix.O_CLOEXEC | posix.O_NONBLOCK | posix.O_NOCTTY
    file = posix.open(path, flags, 0o640)
    if posix.fstat(file).st_size < LOG_LIMIT:
        return file
    try:
        posix.lockf(file, posix.F_TLOCK, 0)
        # Another process may have rotated between our open and our lock: then this file is `.old` already.
        if posix.stat(path).st_ino == posix.fstat(file).st_ino:
            posix.rename(path, path + b".old")
        return posix.open(path, flags, 0o640)
    except OSError:
        return file


def word(text: bytes) -> bytes:
    """A value as one word, so that no value can forge fields of the log."""
    return clean(text, 512).replace(b" ", b"?") or b"-"


def clean(text: bytes, limit: int) -> bytes:
    """Printable text of at most `limit` bytes."""
    return text[:limit].translate(PRINTABLE)


def reason(error: OSError) -> bytes:
    """The message of an errno. A socket path that is too long is refused by Python, without one: 36 is ENAMETOOLONG."""
    return posix.strerror(error.errno or 36).encode()


def number(value: int) -> bytes:
    """Four bytes, big-endian."""
    return value.to_bytes(4, "big")


def timeval(milliseconds: int) -> bytes:
    """The kernel's `struct timeval`."""
    size = 8 if sys.maxsize > 2**32 else 4
    seconds, rest = divmod(milliseconds, 1000)
    return seconds.to_bytes(size, sys.byteorder) + (rest * 1000).to_bytes(size, sys.byteorder)


if __name__ == "__main__":
    posix._exit(main())
