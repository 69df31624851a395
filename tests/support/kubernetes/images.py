"""Container images from local files, without a registry (OCI image layout, one layer)."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_OCI = "application/vnd.oci.image"
_NAME = "io.containerd.image.name"


def write_image(
    archive: Path,
    root: Path,
    *,
    name: str,
    command: Sequence[str],
    entrypoint: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """An archive that `ctr image import` takes: the files below a root, under a full name such as `weft.test/box:1`.

    Entry point and command are what a container runs by default.
    """
    layer = _tar_of(root)
    variables = [f"{name}={value}" for name, value in (environment or {"PATH": "/bin"}).items()]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": list(entrypoint), "Cmd": list(command), "Env": variables},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    blobs = [layer, _json(config)]
    layer_descriptor = _descriptor(layer, kind=f"{_OCI}.layer.v1.tar")
    config_descriptor = _descriptor(blobs[1], kind=f"{_OCI}.config.v1+json")
    blobs.append(_json({"schemaVersion": 2, "config": config_descriptor, "layers": [layer_descriptor]}))
    manifest_descriptor = _descriptor(blobs[2], kind=f"{_OCI}.manifest.v1+json")
    index = {"schemaVersion": 2, "manifests": [{**manifest_descriptor, "annotations": {_NAME: name}}]}
    files = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json(index),
        **{f"blobs/{_digest(blob).replace(':', '/')}": blob for blob in blobs},
    }
    with tarfile.open(archive, "w") as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def _tar_of(root: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(root, arcname=".")
    return buffer.getvalue()


def _json(document: Mapping[str, object]) -> bytes:
    return json.dumps(document).encode()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _descriptor(blob: bytes, *, kind: str) -> dict[str, object]:
    return {"mediaType": kind, "digest": _digest(blob), "size": len(blob)}
