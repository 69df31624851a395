"""Results kept between ADD and DEL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cni.errors import CniError, Code
from weft.lab.cni.result_cache import Attachment, Cached, ResultCache

ATTACHMENT = Attachment(
    container="c1", netns="/run/netns/a", args=(("K", "v"),), capabilities={"mac": "02:00:00:00:00:01"}
)
CACHED = Cached(network="blue", attachment=ATTACHMENT, source=b"{}", result={"cniVersion": "1.0.0"})


def test_an_entry_is_read_until_it_is_removed(tmp_path: Path) -> None:
    """C-116."""
    cache = ResultCache(tmp_path)
    assert cache.read("blue", ATTACHMENT) is None
    cache.write(CACHED)
    assert cache.read("blue", ATTACHMENT) == CACHED
    cache.remove("blue", ATTACHMENT)
    cache.remove("blue", ATTACHMENT)
    assert cache.read("blue", ATTACHMENT) is None


def test_files_have_the_form_of_libcni(tmp_path: Path) -> None:
    """C-116: so that cnitool can go on with what we began, and we with what it began."""
    ResultCache(tmp_path).write(CACHED)
    assert json.loads((tmp_path / "results" / "blue-c1-eth0").read_text()) == {
        "kind": "cniCacheV1",
        "containerId": "c1",
        "config": "e30=",
        "ifName": "eth0",
        "networkName": "blue",
        "netns": "/run/netns/a",
        "cniArgs": [["K", "v"]],
        "capabilityArgs": {"mac": "02:00:00:00:00:01"},
        "result": {"cniVersion": "1.0.0"},
    }


def test_networks_with_a_common_prefix_are_distinguished(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path)
    cache.write(CACHED)
    cache.write(Cached(network="blue-2", attachment=ATTACHMENT, source=b"{}", result={}))
    assert list(cache.all("blue")) == [CACHED]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"kind":"cniCacheV1"}', '{"kind":"x","result":{}}'])
def test_an_unreadable_entry_is_an_error(tmp_path: Path, text: str) -> None:
    cache = ResultCache(tmp_path)
    cache.write(CACHED)
    (tmp_path / "results" / "blue-c1-eth0").write_text(text)
    with pytest.raises(CniError) as failure:
        cache.read("blue", ATTACHMENT)
    assert failure.value.code in {Code.NOT_DECODED, Code.BAD_CONFIG}
    assert list(cache.all("blue")) == []
