"""Builds the C++ kernels on first use and loads them.

The library has a plain C interface and is called through ctypes. Measured against a torch operator
(`TORCH_LIBRARY`): 7 against 4-6 us a call, which is nothing beside a layer's milliseconds, and 2
to 6 against 12 s and more to compile a file, because none of torch's operator headers is needed.

The build folder's name holds a digest of the sources, the flags, torch and the processor, so
machines that share a home directory keep apart. Ranks that start together wait for the one that
builds. The lock is the kernel's (`flock`): it falls with its holder, so a killed build blocks
nobody.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from exegpt.errors import ConfigError

_HERE = Path(__file__).parent
_SOURCES = ("decode_attention.cpp", "kv_append.cpp")
_HEADERS = ("vectors.h",)
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp")
_NAME = "exegpt_kernels"
# A build takes some 10 s on one slow core; after this long its holder hangs.
_LOCK_TIMEOUT_S = 300.0


class BuildError(ConfigError):
    """The C++ kernels cannot be built or loaded on this machine."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """The compiled kernels, built if this machine has not built them yet.

    Returns
    -------
    ctypes.CDLL
        With `exegpt_decode_attention` and `exegpt_append_kv`, argument types set.

    Raises
    ------
    BuildError
        If compiler or ninja is missing, the build fails, or its folder cannot be written.
    """
    folder = build_folder()
    library = folder / f"{_NAME}.so"
    try:
        if not _is_complete(library):
            with _locked(folder):
                if not _is_complete(library):
                    _build(library)
        return _declare(ctypes.CDLL(str(library)))
    except OSError as error:
        raise BuildError(
            f"the C++ kernels cannot be kept in or loaded from {folder}: {error}. "
            "Set TORCH_EXTENSIONS_DIR to a directory that can be written and executed from."
        ) from error


def build_folder() -> Path:
    """Where this machine's build lies: below TORCH_EXTENSIONS_DIR or the user's cache."""
    digest = hashlib.sha256()
    for name in _SOURCES + _HEADERS:
        digest.update((_HERE / name).read_bytes())
    digest.update(repr((_FLAGS, torch.__version__, os.environ.get("CXX"), _processor())).encode())
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = str(Path(cache) / "torch_extensions")
    return Path(root).absolute() / _NAME / digest.hexdigest()[:16]


def _processor() -> str:
    """What `-march=native` depends on: the processor's model and instruction sets."""
    wanted = ("model name", "flags", "Features", "CPU part")
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.machine() + platform.processor()
    first = cpuinfo.read_text().split("\n\n")[0].splitlines()
    return platform.machine() + "".join(line for line in first if line.startswith(wanted))


def _is_complete(library: Path) -> bool:
    """Whether the library is there as built; a file cut short would crash when loaded."""
    digest = library.with_suffix(".sha256")
    if not (library.exists() and digest.exists()):
        return False
    return digest.read_text() == hashlib.sha256(library.read_bytes()).hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    with (folder / "build.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise BuildError(
                        f"another process has held {lock.name} for {_LOCK_TIMEOUT_S:.0f} s. End it, or "
                        "set TORCH_EXTENSIONS_DIR to another directory."
                    ) from None
                time.sleep(0.05)
        yield


def _build(library: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX") or "c++")[0]
    if shutil.which(compiler) is None:
        raise BuildError(f"there is no C++ compiler {compiler!r}. Install g++, or set CXX to a compiler.")
    scratch = library.parent / "build"
    # A build that was killed leaves torch's own lock file, on which torch would wait forever.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    with _ninja_on_path():
        from torch.utils import cpp_extension  # slow to import, and only a build needs it

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about compilers torch was not tested with
                cpp_extension.load(
                    name=_NAME,
                    sources=[str(_HERE / name) for name in _SOURCES],
                    extra_cflags=list(_FLAGS),
                    extra_ldflags=["-fopenmp"],
                    build_directory=str(scratch),
                    is_python_module=False,
                )
        except (RuntimeError, ImportError) as error:
            raise BuildError(f"the C++ kernels do not build in {scratch}: {_gist(error)}") from error
    library.with_suffix(".sha256").unlink(missing_ok=True)
    # torch numbers the builds of one process: the second library has another name.
    next(scratch.glob(f"{_NAME}*.so")).replace(library)
    library.with_suffix(".sha256").write_text(hashlib.sha256(library.read_bytes()).hexdigest())


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Lets torch find the ninja of a virtual environment that is not activated."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([before, str(Path(sys.executable).parent)])
    try:
        if shutil.which("ninja") is None:
            raise BuildError(
                "there is no ninja, which builds the C++ kernels. Install it: pip install ninja."
            )
        yield
    finally:
        os.environ["PATH"] = before


def _gist(error: Exception) -> str:
    """The compiler's first complaint, out of pages of build output."""
    lines = str(error).splitlines()
    return next((line for line in lines if "error" in line.lower() and "building" not in line), lines[0])


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.exegpt_decode_attention.argtypes = [pointer] * 6 + [integer] * 8 + [ctypes.c_float]
    library.exegpt_append_kv.argtypes = [pointer] * 5 + [integer] * 7
    for function in (library.exegpt_decode_attention, library.exegpt_append_kv):
        function.restype = integer
    return library
