"""Which backend the kernels use: C++, or plain torch."""

import ctypes
import functools
import logging
import os

from exegpt.errors import ConfigError

from .native import BuildError, load_library

_log = logging.getLogger(__name__)

BACKENDS = ("c++", "torch")
VARIABLE = "EXEGPT_KERNELS"

_chosen: str | None = None


def set_backend(name: str | None) -> None:
    """Force a backend for this process, or return to the automatic choice.

    Parameters
    ----------
    name : {"c++", "torch"} or None
        None leaves the choice to the variable EXEGPT_KERNELS and, without it, to what builds.

    Raises
    ------
    ConfigError
        If there is no such backend, or "c++" cannot be built here.
    """
    global _chosen
    if name is not None:
        _check(name, "set_backend")
        if name == "c++":
            load_library()
    _chosen = name


def backend() -> str:
    """The backend that CPU tensors go to: "c++" or "torch".

    The first call may build the C++ kernels. If they do not build and nobody asked for them, torch
    is used and one warning is logged.

    Raises
    ------
    ConfigError
        If EXEGPT_KERNELS names no backend, or names "c++" and it cannot be built here.
    """
    return "torch" if library() is None else "c++"


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where plain torch is to be used. Raises like `backend`."""
    name = _chosen or os.environ.get(VARIABLE)
    if not name:
        return _library_if_it_builds()
    _check(name, VARIABLE)
    return load_library() if name == "c++" else None


@functools.cache
def _library_if_it_builds() -> ctypes.CDLL | None:
    try:
        return load_library()
    except BuildError as error:
        _log.warning(
            "Attention runs in plain torch, several times slower in decoding: %s "
            "Set %s=torch to accept this without a warning.",
            error,
            VARIABLE,
        )
        return None


@functools.cache
def announce_reference(kernel: str, reason: str) -> None:
    """Log, once for each reason, that a kernel's torch reference stands in for its C++."""
    _log.warning("%s runs in plain torch, several times slower: %s", kernel, reason)


def _check(name: str, where: str) -> None:
    if name not in BACKENDS:
        raise ConfigError(f"{where}: there is no kernel backend {name!r}. Choose 'c++' or 'torch'.")
