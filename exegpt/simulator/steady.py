"""Closed forms of the steady state: the form of each policy behind one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from exegpt.errors import ConfigError, ProfileRangeError
from exegpt.profiler.grid import FloatArray
from exegpt.schedule import SIDED_POLICIES
from exegpt.simulator.choice import Bounds, Choice, Estimates, IntArray
from exegpt.simulator.forms.chunked import ChunkedForm
from exegpt.simulator.forms.iteration import IterationForm
from exegpt.simulator.forms.rra import RraForm
from exegpt.simulator.forms.static import StaticForm
from exegpt.simulator.forms.waa import SidesForm
from exegpt.simulator.serving import Serving
from exegpt.specs import Policy

__all__ = ["Choice", "Estimates", "IntArray", "SteadyState", "estimate_one"]


class SteadyState(Serving):
    """Estimates of every policy for one model, profile and length distribution; see `Serving`."""

    def estimate(self, choice: Choice, batch: IntArray, extent: IntArray) -> Estimates:
        """Estimates for candidates (batch, extent), arrays of shape (n,); `Choice` says what they count."""
        # Beyond the profile times are infinite, and their differences NaN, which meets no bound.
        with np.errstate(invalid="ignore"):
            return self._form(choice.policy).estimate(
                choice, np.asarray(batch, dtype=np.float64), np.asarray(extent, dtype=np.int64)
            )

    @cached_property
    def _forms(self) -> Mapping[Policy, RraForm | StaticForm | IterationForm | ChunkedForm | SidesForm]:
        static, sides = StaticForm(self), SidesForm(self)
        return {
            Policy.RRA: RraForm(self),
            Policy.STATIC: static,
            Policy.STATIC_HYBRID: static,
            Policy.ITERATION: IterationForm(self),
            Policy.CHUNKED: ChunkedForm(self),
            **dict.fromkeys(SIDED_POLICIES, sides),
        }

    def _form(self, policy: Policy) -> RraForm | StaticForm | IterationForm | ChunkedForm | SidesForm:
        if policy not in self._forms:
            allowed = ", ".join(p.value for p in self._forms)
            raise ConfigError(f"policy {policy.value} cannot be planned yet; allowed are {allowed}")
        return self._forms[policy]

    def bounds(
        self, choices: Sequence[Choice], which: IntArray, batches: IntArray, extents: IntArray
    ) -> Bounds:
        """Bounds of boxes of candidates that hold for all of them.

        Parameters
        ----------
        choices : sequence of Choice
            All of one policy; handing in the same object again saves work.
        which : int array, shape (n,)
            Choice of each box.
        batches, extents : int arrays, shape (n, 2)
            Least and greatest of each knob.
        """
        # Beyond the profile times are infinite, and pools without limit; neither is a bound that prunes.
        with np.errstate(invalid="ignore", over="ignore"):
            return self._form(choices[0].policy).bounds(choices, which, batches, extents)

    def candidate_bytes(self, choice: Choice, batch: IntArray, extent: IntArray) -> FloatArray:
        """Bytes of the fullest rank of candidates of ITERATION or CHUNKED, arrays of shape (n,)."""
        form = self._form(choice.policy)
        assert isinstance(form, IterationForm | ChunkedForm)
        return form.fullest_bytes(choice, batch, extent)

    def refine(
        self, choices: Sequence[Choice], which: IntArray, batches: IntArray, extents: IntArray
    ) -> Bounds | None:
        """Closer bounds of boxes, nearly exact for single candidates; None where the policy has none.

        Arguments as for `bounds`; what these say about memory is not repeated for all boxes.
        """
        form = self._form(choices[0].policy)
        if not isinstance(form, RraForm | ChunkedForm):
            return None
        with np.errstate(invalid="ignore"):
            return form.refine(choices, which, batches, extents)


def estimate_one(
    steady: SteadyState, choice: Choice, encode_batch_size: int, decode_iterations: int
) -> Mapping[str, float]:
    """One candidate's estimate as plain numbers.

    Raises
    ------
    ProfileRangeError
        If the profile does not cover it.
    """
    e = steady.estimate(choice, np.asarray([encode_batch_size]), np.asarray([decode_iterations]))
    if not np.isfinite(e.cycle_s[0]):
        raise ProfileRangeError(
            f"encode_batch_size={encode_batch_size}, decode_iterations={decode_iterations} need larger "
            "batches or "
            "contexts than were profiled. Raise profile.budget_s and profile again, or shrink the batch."
        )
    return {
        "throughput_per_s": float(e.throughput_per_s[0]),
        "throughput_tokens_per_s": float(e.throughput_per_s[0]) * steady.lengths.mean_output,
        "latency_s": float(e.latency_s[0]),
        "ttft_s": float(e.ttft_s[0]),
        "tpot_s": float(e.tpot_s[0]),
        "cycle_s": float(e.cycle_s[0]),
    }
