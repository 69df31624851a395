"""The Python shim, as far as it can be tested without running it; tests/system/shim runs it."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cni import main, wire
from weft.cni.versions import SUPPORTED

BUILT_IN = {"_socket", "posix", "select", "sys", "time"}


def test_it_imports_built_in_modules_only() -> None:
    """Anything else would double the time it takes to start (docs/design/cni-wire.md)."""
    tree = ast.parse(Path(main.__file__).read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported == BUILT_IN
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def test_its_constants_are_those_of_the_contract() -> None:
    """It cannot import them."""
    assert main.MAGIC == wire.MAGIC
    assert main.MAX_BODY == wire.MAX_BODY
    assert main.MAX_STDIN == wire.MAX_STDIN
    assert main.SOCKET.decode() == wire.SOCKET_PATH
    assert json.loads(b"[" + main.SUPPORTED + b"]") == list(SUPPORTED)


def test_the_twin_in_c_has_the_same_strings() -> None:
    source = Path(main.__file__).with_name("shim.c").read_text()
    for constant in (main.SOCKET, main.LOG, main.MAGIC):
        assert f'"{constant.decode()}"' in source
    assert f"DEADLINE_MS = {main.DEADLINE_MS}," in source


NESTED = st.dictionaries(st.text() | st.just("cniVersion"), st.text() | st.lists(st.text()), max_size=3)


@given(
    before=st.dictionaries(st.text().filter(lambda name: name != "cniVersion"), NESTED | st.text(), max_size=3),
    version=st.sampled_from(SUPPORTED),
    indent=st.sampled_from([None, 2]),
)
def test_the_version_is_found_in_any_configuration(before: dict[str, object], version: str, indent: int | None) -> None:
    """C-043: also behind a prevResult that names another."""
    config = json.dumps(before | {"cniVersion": version, "z": {"cniVersion": "7"}}, indent=indent).encode()
    assert main.requested_version(config) == version.encode()


@pytest.mark.parametrize(
    ("config", "version"),
    [
        (b"", b""),
        (b"{}", b""),
        (b'{"cniVersion":"1.0.0"', b"1.0.0"),
        (b'{"cniVersion":"1.0.0', b"1.0.0"),
        (b'{"cniVersion":"0.1.0","cniVersion":"0.2.0"}', b"0.2.0"),
        (b'{"a":"cniVersion","b":"1.0.0"}', b""),
        (b'{"a\\"":"\\\\","cniVersion" : "1.0.0"}', b"1.0.0"),
        (b'["cniVersion","1.0.0"]', b""),
        (b'{"cniVersion":1}', b""),
        (b'{"cniVersion":["1.0.0"]}', b""),
        (b'{"cniVersion":"1.0.0\\n"}', b""),
        (b'{"cniVersion":"' + b"1" * 33 + b'"}', b""),
        (b'{"prevResult":{"cniVersion":"0.3.1"}}', b""),
    ],
)
def test_the_version_is_the_outermost_and_printable(config: bytes, version: bytes) -> None:
    assert main.requested_version(config) == version


@given(config=st.binary())
def test_any_bytes_have_a_version_or_none(config: bytes) -> None:
    assert len(main.requested_version(config)) <= 32
