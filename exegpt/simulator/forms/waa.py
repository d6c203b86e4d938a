"""WAA and DISAGGREGATED in closed form (paper, sections 4.1 and 6; design, section 4).

A batch of B_E prompts leaves an encode pipeline every max_j e_j, or as often as the links take its K/V.
That is the inflow. The pool is the least B_D that drains it, B_D / (E[D] T(B_D)) >= inflow. If none
that memory holds does, decoding limits: the pool is the one that drains fastest, and batches are
encoded as room comes free. A query of D iterations waits half an iteration on average for its
micro-batch's next boundary:

    latency = sum_j e_j + transfer + T / 2 + (D - 1) T + last,

where `last` is the passage of its last token (see `Pools.last_s`). While encoding limits, a batch also
waits between encode stages, behind heavier batches (see `SidesForm._lag_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from exegpt.policies.waa import LEAST_WEIGHED_BATCH
from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import Bounds, Choice, Estimates, IntArray
from exegpt.simulator.forms.counted_batches import batch_encode_s
from exegpt.simulator.forms.decode_pool import DecodePools, Pools, between, meeting_point
from exegpt.simulator.forms.sides_bounds import Prepared, encode_kv_tokens, prepare, sides_bounds
from exegpt.simulator.memory import OVERFLOW_SIGMAS, MemoryPlan
from exegpt.simulator.pipeline import BoolArray
from exegpt.simulator.serving import Serving, make_estimates
from exegpt.simulator.transfer import make_transfer
from exegpt.specs import Policy

# An encode pipeline that is never idle keeps the delay of the heaviest batch of late: of some
# hundred, the mean maximum of which is 2.5 deviations (normal).
HEAVIEST_SIGMAS = 2.5

# Stages this close to the slowest have no slack to catch up with it.
NO_SLACK = 0.97


@dataclass(frozen=True, slots=True)
class _Inflow:
    """What an encode side offers: per candidate, shape (n,).

    `passage_s` from the start of a batch to its end on the last stage, `lag_s` its waits on the way while
    encoding limits, `transfer_s` until its K/V is there, `per_s` queries for one decode pipeline.
    """

    passage_s: FloatArray
    lag_s: FloatArray
    transfer_s: FloatArray
    per_s: FloatArray


@dataclass(frozen=True, slots=True)
class _Balance:
    """Where inflow and drain meet: per candidate, shape (n,).

    `query_s` is an iteration as the bound's query sees it. While encoding limits, it finds the mean pool
    and adds itself; in a pool at its limit it takes the place of another, with longer contexts.
    """

    pool: FloatArray
    per_s: FloatArray
    period_s: FloatArray
    query_s: FloatArray
    last_s: FloatArray
    under_way: FloatArray
    decode_limits: BoolArray


class SidesForm:
    """Estimates of the policies with two sides."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.pools = DecodePools(serving)
        self._prepared: Prepared | None = None

    def bounds(
        self, choices: Sequence[Choice], which: IntArray, batches: IntArray, extents: IntArray
    ) -> Bounds:
        """Bounds of boxes of B_E; see `sides_bounds`. Handing in the same `choices` again saves work."""
        if self._prepared is None or self._prepared.choices is not choices:
            self._prepared = prepare(self.serving, self.pools, choices)
        return sides_bounds(self.serving, self.pools, self._prepared, which, batches)

    def estimate(self, choice: Choice, batch: FloatArray, extent: IntArray) -> Estimates:
        """Estimates of encode batches `batch`, shape (n,); `extent` has no meaning here.

        `decode_batch_size` is the room of one decode pipeline: the pool, the queries on their way to
        it, and what the pool may grow by.
        """
        inflow = self._inflow(choice, batch)
        pools = self.pools.of(choice.decode_stages, choice.num_micro_batches)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = self._balance(pools, inflow, batch)
            per_replica = choice.num_decode_instances * found.per_s
            cycle = np.where(per_replica > 0, batch / per_replica, np.inf)
            ttft, latency = self._latency(inflow, found)
        room = found.pool + found.under_way
        # A pool that encoding limits may grow; one at its limit is kept there.
        growth = OVERFLOW_SIGMAS * np.sqrt(found.pool * self.pools.moments.count_variance)
        room = room + np.where(found.decode_limits, 0.0, growth)
        return make_estimates(
            choice.num_replicas * per_replica,
            latency,
            ttft,
            self._num_gaps(),
            room,
            cycle,
            self._memory(choice, batch, found),
        )

    def _num_gaps(self) -> int:
        """Times between tokens of the bound's query."""
        ends = self.serving.completion.iterations_of(self.serving.bound_output_tokens)
        return max(ends - 1, 0) if self.serving.model.is_encoder_decoder else ends

    def _inflow(self, choice: Choice, batch: FloatArray) -> _Inflow:
        serving = self.serving
        stage_s = batch_encode_s(serving, choice.policy, choice.encode_stages, batch)
        transfer = make_transfer(
            serving.profile, serving.model, choice.policy, choice.encode_stages, choice.decode_stages
        )
        tokens = batch * serving.mean_input
        share = choice.num_encode_instances / choice.num_decode_instances
        links = np.maximum(transfer.source_s(tokens), share * transfer.target_s(tokens))
        return _Inflow(
            passage_s=stage_s.sum(-1),
            lag_s=self._lag_s(choice, stage_s, batch),
            transfer_s=transfer.latency_s(batch * self.pools.moments.handed_tokens),
            per_s=share * batch / np.maximum(stage_s.max(-1), links),
        )

    def _lag_s(self, choice: Choice, stage_s: FloatArray, batch: FloatArray) -> FloatArray:
        """How long a batch waits between encode stages while the slowest one is never idle.

        Stage 0 starts batches as fast as the slowest stage takes them, so one that follows a heavier
        batch catches up with it, and those behind it have no slack to make up for that: the delay of
        the heaviest batch stays, on every stage before the last of the slowest.
        """
        lengths = self.serving.lengths
        tokens = batch * lengths.mean_input
        if choice.policy is Policy.DISAGGREGATED:
            variance = batch * lengths.std_input**2
        else:
            # A batch ends at the prompt nearest to plan: evenly within half a prompt that tokens choose.
            n = np.arange(len(lengths.input_pmf), dtype=np.float64)
            weighed = float(lengths.input_pmf @ n**3) / (12 * lengths.mean_input)
            variance = np.where(batch < LEAST_WEIGHED_BATCH, batch * lengths.std_input**2, weighed)
            variance = variance * (lengths.std_input > 0)
        heavier = HEAVIEST_SIGMAS * np.hypot(
            stage_s * (np.sqrt(variance) / tokens)[:, None], self._longer_s(choice, batch) - stage_s
        )
        slow = stage_s >= NO_SLACK * stage_s.max(-1, keepdims=True)
        # 1 on every stage that a slowest one comes after.
        before = np.logical_or.accumulate(slow[:, ::-1], axis=1)[:, ::-1][:, 1:]
        return np.asarray(np.where(before, heavier[:, :-1], 0.0).sum(-1))

    def _longer_s(self, choice: Choice, batch: FloatArray) -> FloatArray:
        """Stage times of a batch as heavy as planned, but with squared lengths one deviation above plan."""
        serving = self.serving
        pmf = serving.lengths.input_pmf
        n = np.arange(len(pmf), dtype=np.float64)
        from_mean, squares = n - serving.mean_input, n**2 - serving.lengths.mean_square_input
        total = float(pmf @ squares**2)
        common = float(pmf @ (squares * from_mean)) ** 2
        # What the sum of lengths, which is fixed, does not say about the sum of squares.
        rest = total - common / serving.lengths.std_input**2 if serving.lengths.std_input > 0 else 0.0
        rms = np.sqrt(serving.lengths.mean_square_input + np.sqrt(max(rest, 0.0) / batch))
        covered = min(g.encode_attention.limit(1) for g in serving.profile.layers.values())
        rms = np.minimum(rms, min(float(serving.lengths.max_input), covered))
        return serving.costs(choice.encode_stages).encode_s(batch, batch * serving.mean_input, rms)

    def _balance(self, pools: Pools, inflow: _Inflow, batch: FloatArray) -> _Balance:
        mean_iterations = self.pools.moments.mean_iterations
        offered = inflow.per_s
        under_way = self._under_way(
            np.minimum(offered[:, None], pools.drain_per_s), inflow, batch, pools.period_s
        )
        held = pools.kv_tokens + self.pools.kv_tokens(np.zeros_like(under_way), under_way)
        fits = np.logical_and.accumulate(held <= pools.room_tokens, axis=1) & np.isfinite(pools.period_s)
        # Nothing fits: the least pool stands for what memory lacks.
        fits[:, 0] = True
        drain = np.where(fits, pools.drain_per_s, -1.0)
        enough = drain >= offered[:, None]
        decode_limits = np.logical_not(enough.any(axis=1))
        at = np.where(decode_limits, drain.argmax(axis=1), enough.argmax(axis=1))
        before = np.maximum(at - 1, 0)
        pool, share = meeting_point(
            offered * mean_iterations,
            pools.size[before],
            pools.size[at],
            pools.period_s[before],
            pools.period_s[at],
        )
        pool = np.where(decode_limits, pools.size[at], pool)
        share = np.where(decode_limits, 1.0, share)
        period = between(pools.period_s[before], pools.period_s[at], share)
        last = between(pools.last_s[before], pools.last_s[at], share)
        right = before + 1
        slope = (pools.period_s[right] - pools.period_s[before]) / (pools.size[right] - pools.size[before])
        added = self._bound_weight - np.where(decode_limits, 1.0, 0.0)
        query = period + np.where(np.isfinite(slope), slope * np.maximum(added, 0.0), 0.0)
        per_s = np.where(decode_limits, pools.drain_per_s[at], offered)
        spare = np.where(decode_limits, (batch - 1) / 2, batch)
        waiting = per_s * (inflow.passage_s + inflow.transfer_s + period / 2)
        under = np.where(per_s > 0, waiting, 0.0) + spare
        return _Balance(pool, per_s, period, query, last, under, np.asarray(decode_limits))

    @cached_property
    def _bound_weight(self) -> float:
        """Mean context of the bound's query, in contexts of a mean query of the pool."""
        ends = self.serving.completion.iterations_of(self.serving.bound_output_tokens)
        own = self.serving.mean_input + (ends + 1) / 2
        return own / self.pools.moments.context_tokens if self.pools.moments.context_tokens else 1.0

    def _under_way(
        self, per_s: FloatArray, inflow: _Inflow, batch: FloatArray, period_s: FloatArray
    ) -> FloatArray:
        """Queries that hold room without being in a pool, by candidate and pool.

        By Little's law those of the handover; and up to a batch, since one starts only with all its room.
        """
        handover = (inflow.passage_s + inflow.transfer_s)[:, None] + period_s / 2
        # A pool beyond the profile drains nothing, in infinite time.
        return np.multiply(per_s, handover, out=np.zeros(handover.shape), where=per_s > 0) + batch[:, None]

    def _latency(self, inflow: _Inflow, found: _Balance) -> tuple[FloatArray, FloatArray]:
        """Time to first token, and to the last, of the bound's query."""
        ends = self.serving.completion.iterations_of(self.serving.bound_output_tokens)
        passage = inflow.passage_s + np.where(found.decode_limits, 0.0, inflow.lag_s)
        encoded = np.where(found.per_s > 0, passage, np.inf)
        if ends == 0:
            return encoded, encoded
        joined = encoded + inflow.transfer_s + found.period_s / 2
        latency = joined + (ends - 1) * found.query_s + found.last_s
        return (joined + found.last_s if self.serving.model.is_encoder_decoder else encoded), latency

    def _memory(self, choice: Choice, batch: FloatArray, found: _Balance) -> MemoryPlan:
        """Bytes of both sides' stages, the encode side's first."""
        serving = self.serving
        prompts = encode_kv_tokens(serving, len(choice.encode_stages), batch)
        encode = serving.memory(choice.encode_stages, prompts, batch * serving.mean_input, batch)
        rows = np.maximum(found.pool / choice.num_micro_batches, 1.0)
        kv_tokens = self.pools.kv_tokens(found.pool, found.under_way)
        decode = serving.memory(choice.decode_stages, kv_tokens, np.zeros_like(batch), rows)
        return MemoryPlan(
            weights_bytes=np.concatenate([encode.weights_bytes, decode.weights_bytes], axis=-1),
            kv_bytes=np.concatenate([encode.kv_bytes, decode.kv_bytes], axis=-1),
            activation_bytes=np.concatenate([encode.activation_bytes, decode.activation_bytes], axis=-1),
        )
