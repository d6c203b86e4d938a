"""Bounds over boxes of ITERATION candidates: least times of a turn, for every number of slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.simulator.choice import Bounds, Choice, IntArray
from exegpt.simulator.costs import StageCosts
from exegpt.simulator.forms.stage_parts import LAYER, stage_parts
from exegpt.simulator.forms.turns import TurnSample
from exegpt.simulator.serving import Serving


@dataclass(frozen=True, slots=True)
class _Curves:
    """Mean times over the sample by slots of a micro-batch, 0 on; of one part of a stage.

    `encode` of the prompts that join, `decode` of the rows beside them, `tagged` of the prompts that join
    together with the bound's query, `calm` of decoding in every slot.
    """

    encode: FloatArray
    decode: FloatArray
    tagged: FloatArray
    calm: FloatArray


class TurnCurves:
    """Mean turn times of the parts that stages consist of: a layer, and what a stage has beside its layers.

    Stage times are sums of both, and means are linear, so the curves of any stage follow.
    """

    def __init__(self, serving: Serving, sample: TurnSample, mean_context: float, mean_input: float) -> None:
        self.serving = serving
        self.sample = sample
        self.mean_context = mean_context
        self.mean_input = mean_input
        self._most = 0
        # True over played number of prompts that join in a turn, by slots.
        self.joining_share = np.zeros(0)
        self._parts: dict[tuple[int, int], _Curves] = {}

    def stage(self, degree: int, layers: float, flags: int, most: int) -> _Curves:
        """Curves of one kind of stage, for 0 to at least `most` slots."""
        if most > self._most:
            self._parts.clear()
            self._most = max(most, 2 * self._most)
        if (degree, LAYER) not in self._parts:
            self._compute(degree)
        layer, rest = self._parts[degree, LAYER], self._parts[degree, flags]
        names = _Curves.__dataclass_fields__
        return _Curves(*(layers * getattr(layer, name) + getattr(rest, name) for name in names))

    def _compute(self, degree: int) -> None:
        parts = stage_parts(self.serving, degree, self._times)
        for part, curves in parts.items():
            self._parts[degree, part] = _Curves(*curves)

    def _times(self, costs: StageCosts) -> FloatArray:
        """Curves of a pipeline's stages, (4, slots, stages)."""
        slots = np.arange(self._most + 1)
        doublings = self.sample.doublings(np.maximum(slots, 1).astype(np.float64))
        joining = self.sample.joining(slots, doublings)
        tagged = self.sample.joining(np.maximum(slots - 1, 0), np.zeros_like(slots)) + 1
        mean = joining.mean(0)
        true = self.sample.chance * slots
        self.joining_share = np.divide(true, mean, out=np.zeros_like(mean), where=mean > 0)
        most = int(max(joining.max(), tagged.max()))
        tokens, squares = self.sample.prompts(most)
        queries = np.broadcast_to(np.arange(most + 1.0), tokens.shape)
        rows = slots.astype(np.float64)
        encode = costs.encode_s(queries, tokens, np.sqrt(squares / np.maximum(queries, 1.0)))
        decode = costs.decode_s(rows, rows * self.mean_context, rows * self.mean_input)
        turns = np.arange(self.sample.num_turns)[:, None]
        means = encode[turns, joining].mean(0), decode[slots - joining].mean(0), encode[turns, tagged].mean(0)
        return np.stack([*means, decode])


class IterationBounds:
    """Bounds of boxes of slots, which are multiples of the micro-batches.

    Notes
    -----
    `IterationForm.estimate` takes a turn as c + s (f - c): c without anyone joining, f of the sample played
    through the pipeline, s true over played joining. It rises with f, which is no less than the mean work
    of any stage, nor than a micro-batch's share of the mean passage through all stages (`least_turn_s`).
    c, s and these are known for every number q of slots in a micro-batch, and give the least time l(q) of
    a turn. Then with p the chance of a slot to be taken

    - throughput is p q over the turn, at most p q / l(q);
    - the first token takes at least the passage of a turn's encoding, of the query and who joins with it;
    - latency is that and D turns of each of m micro-batches in which one slot less is taken, which rise
      with the turn as well.

    A box takes the greatest and least of these over its q: nothing is assumed about how they depend on q.
    """

    def __init__(self, serving: Serving, curves: TurnCurves, choices: Sequence[Choice]) -> None:
        self.serving = serving
        self.curves = curves
        self.choices = choices
        self.ends = serving.completion.iterations_of(serving.bound_output_tokens)
        self._known: dict[int, tuple[FloatArray, FloatArray, FloatArray]] = {}

    def of(self, which: IntArray, batches: IntArray) -> Bounds:
        """Bounds of boxes, memory left at zero."""
        per_s, latency, ttft, tpot = np.zeros((4, len(which)))
        gaps = max(self.serving.num_gaps, 1)
        # Curves of all choices reach equally far: each further reach computes them anew.
        most = max(
            (
                -(-last // self.choices[i].num_micro_batches) + 1
                for i, last in zip(which.tolist(), batches[:, 1].tolist(), strict=True)
            ),
            default=0,
        )
        for row, (index, first, last) in enumerate(zip(which.tolist(), *batches.T.tolist(), strict=True)):
            m = self.choices[index].num_micro_batches
            low, high = first // m, -(-last // m) + 1
            least, others, encode = (curve[low:high] for curve in self._of_choice(index, max(high, most)))
            decode = self.ends * m * others
            shares = np.divide(np.arange(low, high), least, out=np.zeros_like(least), where=least > 0)
            per_s[row] = self.curves.sample.chance * self.choices[index].num_replicas * shares.max()
            # Encoding an encoder-decoder model yields no token; the first one is a turn later.
            waits = 0.0 if self.serving.first_token_at_encoding or not self.ends else m * others
            latency[row], ttft[row] = (encode + decode).min(), (encode + waits).min()
            tpot[row] = (decode - waits).min() / gaps
        return Bounds(
            throughput_upper_per_s=per_s,
            latency_lower_s=latency,
            ttft_lower_s=ttft,
            memory_lower_bytes=np.zeros(len(which)),
            tpot_lower_s=tpot,
        )

    def _of_choice(self, index: int, most: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """By slots of a micro-batch: least time of a turn, of one of the query's, and to encode it."""
        if index not in self._known or len(self._known[index][0]) <= most:
            choice = self.choices[index]
            kinds = self.serving.tables.stage_kinds(choice.stages)
            stages = [self.curves.stage(*kind, most) for kind in kinds]
            m = choice.num_micro_batches
            played = np.maximum(
                np.max([s.encode + s.decode for s in stages], axis=0),
                np.maximum(_total(stages, "encode"), _total(stages, "decode")) / m,
            )
            calm = np.maximum(np.max([s.calm for s in stages], axis=0), _total(stages, "calm") / m)
            floor = np.minimum(calm, played)
            with np.errstate(invalid="ignore"):
                turn = np.maximum(calm + self.curves.joining_share * (played - calm), floor)
                slots = m * np.maximum(np.arange(len(turn)), 1)
                others = np.maximum(calm + (turn - calm) * (1 - 1 / slots), floor)
            # Beyond the profile differences of infinite times are not numbers.
            beyond = ~np.isfinite(calm + played)
            turn, others = (np.where(beyond, np.inf, values) for values in (turn, others))
            self._known[index] = turn, others, _total(stages, "tagged")
        return self._known[index]


def _total(stages: Sequence[_Curves], name: str) -> FloatArray:
    return np.asarray(np.sum([getattr(stage, name) for stage in stages], axis=0))
