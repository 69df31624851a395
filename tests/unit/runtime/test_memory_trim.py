"""Start-up loads no CA certificates, and free memory is returned to the system."""

from __future__ import annotations

import os
import subprocess
import sys

from weft.lab.waiting import DEADLINE

LOOK = """
import os, weft.agent.main, aiohttp.connector
default = aiohttp.connector._SSL_CONTEXT_VERIFIED
saved = [os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")]
print(len(default.get_ca_certs()), default.verify_mode.name, *saved)
"""


def look(**variables: str) -> list[str]:
    """What the agent's program has read of the system's certificates when it is imported."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SSL_")}
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE,
        env=plain | variables,
    )
    return done.stdout.split()


def test_aiohttp_loads_no_certificates_and_its_default_context_trusts_no_server() -> None:
    assert look() == ["0", "CERT_REQUIRED", "None", "None"]


def test_where_the_certificates_are_is_said_as_before() -> None:
    assert look(SSL_CERT_FILE="/etc/mine.pem", SSL_CERT_DIR="/etc/mine")[2:] == ["/etc/mine.pem", "/etc/mine"]


GIVE_BACK = """
from pathlib import Path
from weft.runtime.memory_trim import trim_memory
def resident_pages(): return int(Path("/proc/self/statm").read_text().split()[1])
chunks = [bytes(4000) for _ in range(10_000)]
del chunks[:-1]  # the last one keeps the heap from shrinking by itself
before = resident_pages()
trim_memory()
print(before - resident_pages())
"""


def test_memory_that_was_needed_for_a_moment_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GIVE_BACK], capture_output=True, text=True, check=True, timeout=DEADLINE
    )
    assert int(done.stdout) > 5_000, "of some 10,000 pages"
