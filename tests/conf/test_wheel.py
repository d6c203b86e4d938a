"""The wheel carries the whole package, and the clone is what an editable install imports."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOTS = {"exegpt": "exegpt", "conf": "exegpt/conf", "kernels": "exegpt/kernels"}
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "*.so", "*.o", "build")


@pytest.fixture(scope="module")
def source(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of what a wheel is built from, so that building leaves nothing in the clone."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, copy / name)
    for name in ROOTS:
        shutil.copytree(repository / name, copy / name, ignore=IGNORED)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "-w", str(out), str(source)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("exegpt-*.whl")
    return built


@pytest.mark.slow
def test_wheel_has_every_file(source: Path, wheel: Path) -> None:
    expected = {
        f"{inside}/{path.relative_to(source / root)}"
        for root, inside in ROOTS.items()
        for path in (source / root).rglob("*")
        if path.is_file() and "egg-info" not in str(path)
    }
    assert {"exegpt/conf/config.yaml", "exegpt/kernels/__init__.py", "exegpt/specs.py"} <= expected
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    assert held == expected
    assert len(licences) == 1


@pytest.mark.slow
def test_installed_configuration_composes(wheel: Path, tmp_path: Path) -> None:
    """From the unpacked wheel alone: `pkg://exegpt.conf`, every group, logging options included."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "from hydra import compose, initialize_config_module\n"
        "import exegpt\n"
        "from exegpt.config import register, to_job\n"
        "register()\n"
        "with initialize_config_module('exegpt.conf', version_base='1.3'):\n"
        "    job = to_job(compose('config', overrides=['experiment=task-translation-cpu']))\n"
        "print(exegpt.__file__, job.workload.name)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "exegpt" / "__init__.py"), "translation"]


@pytest.mark.parametrize(
    ("package", "root"), [("exegpt", "exegpt"), ("exegpt.conf", "conf"), ("exegpt.kernels", "kernels")]
)
def test_editable_install_points_into_the_clone(package: str, root: str, repository: Path) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} cannot be imported; install the clone with pip install -e ."
    assert spec.origin == str(repository / root / "__init__.py")
