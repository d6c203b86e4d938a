"""Splits the time of a stage among its parts, at the seams that the model code has."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Stopwatch:
    """Adds the time since the last mark to the part just ended.

    On CUDA kernels run behind the host's back, so marks are events in the stream and are read after
    it has drained; on CPU they are the clock.
    """

    device: torch.device
    _last: Any = None
    _seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _events: list[tuple[str, Any, Any]] = field(default_factory=list)

    def _now(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def start(self) -> None:
        """Forget everything and begin."""
        self._seconds.clear()
        self._events.clear()
        self._last = self._now()

    def mark(self, part: str) -> None:
        """End `part` and begin the next one."""
        now = self._now()
        if self.device.type == "cuda":
            self._events.append((part, self._last, now))
        else:
            self._seconds[part] += now - self._last
        self._last = now

    def read(self) -> dict[str, float]:
        """Seconds of every part since `start`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            for part, begin, end in self._events:
                self._seconds[part] += begin.elapsed_time(end) / 1e3
            self._events.clear()
        return dict(self._seconds)
