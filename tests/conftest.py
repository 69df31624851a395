"""What all tests share: properties are checked without a stopwatch, for the machine may be busy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

BUILD_WITHIN = 1200.0
SCRIPTS = Path(__file__).parents[1] / "scripts"

settings.register_profile("weft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weft")


def build(script: str, *words: str) -> str:
    """What a script that builds something prints, which is where it is."""
    command = [str(SCRIPTS / script), *words]
    environment = {**os.environ, "PYTHON": sys.executable}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=BUILD_WITHIN)
    assert built.returncode == 0, built.stderr
    return built.stdout.strip()


@pytest.fixture(scope="session")
def cnitool() -> str:
    """The program of the CNI project that calls plugins; built when it is not there yet."""
    return build("build-cnitool")


@pytest.fixture(scope="session")
def containerd_2() -> Path:
    """The directory of containerd 2 with its shim and client; built when it is not there yet."""
    return Path(build("build-containerd"))


@pytest.fixture(scope="session")
def kube_apiserver() -> Path:
    """The directory of Kubernetes' programs, where there is kube-apiserver at least; built when it is not there yet."""
    return Path(build("build-kubernetes", "kube-apiserver"))


@pytest.fixture(scope="session")
def kubernetes() -> Path:
    """The directory of all of Kubernetes' programs that a cluster needs; built when one is not there yet."""
    return Path(build("build-kubernetes"))


@pytest.fixture(scope="session")
def kubernetes_e2e() -> Path:
    """The same directory, where the Kubernetes project's own tests are too; built when they are not there yet."""
    return Path(build("build-kubernetes", "e2e.test", "agnhost"))


@pytest.fixture(scope="session")
def shipped_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of the image that packaging/Containerfile describes, built without any registry of images."""
    return Path(build("build-image", str(tmp_path_factory.mktemp("image") / "weft.tar")))
