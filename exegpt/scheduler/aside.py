"""A computation beside the caller's, in a forked process that shares all that was computed before."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from exegpt.errors import ExeGPTError

T = TypeVar("T")


class Aside(Generic[T]):
    """Starts `compute` at once in a process of its own, or waits with it where there is no second core.

    Parameters
    ----------
    compute : callable
        Without side effects; its result and its ExeGPTErrors must be picklable.
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute = compute
        self._process: multiprocessing.process.BaseProcess | None = None
        if "fork" in multiprocessing.get_all_start_methods() and _num_cores() > 1:
            context = multiprocessing.get_context("fork")
            self._connection, sender = context.Pipe(duplex=False)
            # A daemon ends with its parent, whatever ends that.
            self._process = context.Process(target=_send, args=(compute, sender), daemon=True)
            self._process.start()
            sender.close()

    def result(self) -> T:
        """The result, waited for.

        Raises
        ------
        ExeGPTError
            What `compute` raised.
        """
        if self._process is None:
            return self._compute()
        try:
            found = self._connection.recv()
        except EOFError:
            # It ended without an answer (killed for memory, say): here its fault shows itself.
            found = self._compute()
        self._process.join()
        if isinstance(found, ExeGPTError):
            raise found
        return found  # type: ignore[no-any-return]


def _send(compute: Callable[[], T], sender: Connection) -> None:
    try:
        sender.send(compute())
    except ExeGPTError as error:
        sender.send(error)
    except BaseException:
        # The parent computes it once more and meets the same fault.
        pass
    finally:
        sender.close()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
