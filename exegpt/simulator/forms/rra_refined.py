"""Lower bounds of single RRA candidates, of many choices at once: nearly exact, and exact for one stage.

The cycle is at least as long as two of the circuits of jobs whose longest is the cycle
(`simulator.pipeline`): all that one stage does, m (e_j + sum_u d_uj), and once through encoding, n - 1
iterations and the last one's first job. Costs are those of the closed form, block by block of iterations,
with its wait for the longest of several ragged encode micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import Bounds, IntArray
from exegpt.simulator.forms.encode_spread import EncodeSpread
from exegpt.simulator.forms.rra_bounds import Prepared, candidate_memory
from exegpt.simulator.iteration_blocks import Blocks
from exegpt.simulator.serving import Serving
from exegpt.simulator.stage_tables import StageKinds


@dataclass(frozen=True, slots=True)
class _Times:
    """Encode times (n, kinds); decode times (n, blocks, kinds); their sums and periods (n, blocks)."""

    encode: FloatArray
    decode: FloatArray
    whole: FloatArray
    period: FloatArray


def refined_bounds(
    serving: Serving,
    spread: EncodeSpread,
    prepared: Prepared,
    which: IntArray,
    batch: IntArray,
    n_d: IntArray,
) -> Bounds:
    """Bounds of candidates: choice `which`, B_E `batch`, N_D `n_d`; each of shape (n,)."""
    kinds = prepared.kinds.take(which)
    m = prepared.num_micro_batches[which]
    size = batch.astype(np.float64)
    blocks = serving.iteration_blocks.of(n_d)
    with np.errstate(invalid="ignore", over="ignore"):
        times = _times(serving, kinds, m, size, blocks)
        longest = _longest_encode(spread, kinds, m, size, n_d, times.encode)
        phase = kinds.total(times.encode) + (m - 1) * kinds.slowest(times.encode) + longest
        cycle = _cycle(kinds, m, blocks, times, phase)
        decode = _decode(serving, cycle, blocks, times, n_d)
    first = phase if serving.first_token_at_encoding else phase + times.whole[:, 0]
    gaps = serving.num_gaps
    after = (phase + decode - first) / gaps if gaps else np.zeros_like(phase)
    return Bounds(
        throughput_upper_per_s=np.nan_to_num(prepared.num_replicas[which] * size / cycle),
        latency_lower_s=np.nan_to_num(phase + decode, nan=np.inf),
        ttft_lower_s=np.nan_to_num(first, nan=np.inf),
        tpot_lower_s=np.nan_to_num(after, nan=np.inf),
        memory_lower_bytes=candidate_memory(serving, prepared.memory[which], m, size, n_d),
    )


def _times(serving: Serving, kinds: StageKinds, m: FloatArray, size: FloatArray, blocks: Blocks) -> _Times:
    count, width = blocks.weights.shape
    share = (size / m)[:, None]
    decode = serving.tables.decode_s(
        kinds.take(np.repeat(np.arange(count), width)),
        *((share * part).ravel() for part in (blocks.active, blocks.context, blocks.inputs)),
    ).reshape(count, width, -1)
    whole = np.asarray((decode * kinds.count[:, None, :]).sum(-1))
    return _Times(
        encode=serving.tables.encode_s(kinds, size / m),
        decode=decode,
        whole=whole,
        period=np.maximum(whole, m[:, None] * decode.max(-1)),
    )


def _longest_encode(
    spread: EncodeSpread,
    kinds: StageKinds,
    m: FloatArray,
    size: FloatArray,
    n_d: IntArray,
    encode: FloatArray,
) -> FloatArray:
    """What the longest micro-batch adds to the encode phase, on every stage but the one it adds most to."""
    gains = np.zeros_like(encode)
    for value in np.unique(m).tolist():
        rows = np.flatnonzero((m == value) & (kinds.count.sum(-1) > 1))
        if value > 1 and len(rows):
            gains[rows] = spread.of_kinds(kinds.take(rows), int(value), size[rows], n_d[rows], encode[rows])
    return np.where(kinds.count.sum(-1) > 1, kinds.total(gains) - kinds.slowest(gains), 0.0)


def _cycle(kinds: StageKinds, m: FloatArray, blocks: Blocks, times: _Times, phase: FloatArray) -> FloatArray:
    weights = blocks.weights
    along = kinds.slowest(m[:, None] * (times.encode + (times.decode * weights[..., None]).sum(1)))
    last = np.maximum((weights > 0).sum(1) - 1, 0)[:, None]
    final = np.take_along_axis(times.period, last, axis=1)[:, 0]
    # The pipeline's first stage is its first kind.
    begun = np.take_along_axis(times.decode[..., 0], last, axis=1)[:, 0]
    # The first iteration is a passage, not a period; of one iteration only the first job is there.
    turns = times.whole[:, 0] + (weights * times.period)[:, 1:].sum(1) - final
    return np.maximum(along, phase + np.where(last[:, 0] > 0, turns, 0.0) + begun)


def _decode(serving: Serving, cycle: FloatArray, blocks: Blocks, times: _Times, n_d: IntArray) -> FloatArray:
    """From the end of encoding to the bound query's last token."""
    ends = serving.completion.iterations_of(serving.bound_output_tokens)
    if ends == 0:
        return np.zeros_like(cycle)
    cycles, rest = np.divmod(ends - 1, n_d)
    at, left = blocks.place(rest + 1)
    steps = np.cumsum(blocks.weights * times.period, axis=1)
    end = np.take_along_axis(steps, at[:, None], axis=1)[:, 0]
    end -= left * np.take_along_axis(blocks.weights * times.period, at[:, None], axis=1)[:, 0]
    waited = np.where(cycles > 0, np.maximum(cycles, 1) * cycle, 0.0)
    # The first iteration is a passage, not a period.
    return np.asarray(waited + end - times.period[:, 0] + times.whole[:, 0])
