"""What all closed forms share: model, profile, lengths, and what follows from them."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.profiler.table import ProfileTable
from exegpt.schedule import Stage
from exegpt.simulator.choice import Estimates
from exegpt.simulator.costs import StageCosts, stage_shapes
from exegpt.simulator.iteration_blocks import IterationBlocks
from exegpt.simulator.memory import MemoryPlan, plan_memory
from exegpt.simulator.pool_tables import PoolTables
from exegpt.simulator.stage_tables import StageKinds, StageTables
from exegpt.specs import Counting, ModelSpec
from exegpt.workload.completion import Completion
from exegpt.workload.lengths import RequestLengths


class Serving:
    """One model, profile and length distribution, with the moments that the forms ask for.

    Parameters
    ----------
    model, profile, lengths
    counting : Counting
        `paper` gives the published completion formulas, for comparison with its tables.
    length_percentile : float
        The bound's query has this percentile of the output lengths.
    page_size : int
        Tokens of a K/V page.
    memory_bytes : float
        Of a GPU; a decode pipeline that cannot keep up with encoding fills it.
    """

    def __init__(
        self,
        model: ModelSpec,
        profile: ProfileTable,
        lengths: RequestLengths,
        *,
        counting: Counting = Counting.exact,
        length_percentile: float = 99.0,
        page_size: int = 16,
        memory_bytes: float = math.inf,
    ) -> None:
        self.model = model
        self.profile = profile
        self.lengths = lengths
        self.page_size = page_size
        self.memory_bytes = memory_bytes
        # An encoder-decoder model's encoding yields no token.
        self.first_token_at_encoding = not model.is_encoder_decoder
        self.completion = Completion(lengths, counting, first_token_at_encoding=self.first_token_at_encoding)
        self.bound_output_tokens = lengths.output_percentile(length_percentile)
        # Times between tokens of the bound's query; the paper counts one more.
        self.num_gaps = self.bound_output_tokens - (counting is Counting.exact)
        # Moments are sums over the pmfs; the search asks for them thousands of times.
        self.mean_input = lengths.mean_input
        self.rms_input = float(np.sqrt(lengths.mean_square_input))
        self._pipelines: dict[tuple[Stage, ...], tuple[StageKinds, list[int]]] = {}
        self._costs: dict[tuple[Stage, ...], StageCosts] = {}
        self._memory_coefficients: dict[tuple[Stage, ...], FloatArray] = {}

    def costs(self, stages: tuple[Stage, ...]) -> StageCosts:
        """Stage costs of a pipeline."""
        if stages not in self._costs:
            self._costs[stages] = StageCosts(self.profile, self.model, stage_shapes(stages))
        return self._costs[stages]

    @cached_property
    def tables(self) -> StageTables:
        """Stage times of many pipelines at once."""
        return StageTables(self.profile, self.model, self.mean_input, self.rms_input)

    @cached_property
    def pool_tables(self) -> PoolTables:
        """What RRA's pool holds under every N_D."""
        return PoolTables(self.completion)

    @cached_property
    def iteration_blocks(self) -> IterationBlocks:
        """RRA's cycles in blocks of iterations."""
        return IterationBlocks(self.completion, self.pool_tables.most, separate_inputs=self.tables.has_cross)

    @cached_property
    def mean_context(self) -> float:
        """Mean tokens that an active query attends to, over all its decode iterations."""
        survival = self.completion.survival
        total = float(survival.sum())
        return float(survival @ self.completion.context) / total if total else self.mean_input + 1

    def memory_coefficients(self, stages: tuple[Stage, ...]) -> FloatArray:
        """Bytes per stage: fixed, per K/V token, per token encoded at once, per row sampled at once.

        `plan_memory` is linear in its three amounts; shape (different stages, 4).
        """
        if stages not in self._memory_coefficients:
            unit = np.eye(4)
            plan = self.memory(stages, unit[1], unit[2], unit[3]).total_bytes
            coefficients = np.concatenate([plan[:1], plan[1:] - plan[0]]).T
            self._memory_coefficients[stages] = np.unique(coefficients, axis=0)
        return self._memory_coefficients[stages]

    def fullest_bytes(
        self, stages: tuple[Stage, ...], kv_tokens: FloatArray, encode_tokens: FloatArray, rows: FloatArray
    ) -> FloatArray:
        """Bytes of the fullest rank; arguments as in `plan_memory`, shape (n,)."""
        amounts = np.stack(np.broadcast_arrays(1.0, kv_tokens, encode_tokens, rows))
        return np.asarray((self.memory_coefficients(stages) @ amounts).max(0))

    def encode_s(self, stages: tuple[Stage, ...], queries: FloatArray) -> FloatArray:
        """Mean stage times to encode a micro-batch of `queries` prompts; shape (n, num_stages)."""
        kinds, place = self.kinds(stages)
        return np.asarray(self.tables.encode_s(kinds, queries)[:, place])

    def decode_s(
        self, stages: tuple[Stage, ...], queries: FloatArray, context: FloatArray, inputs: FloatArray
    ) -> FloatArray:
        """Stage times of decode iterations; arguments of one shape, result (*shape, num_stages).

        `context` are the summed tokens attended to, `inputs` those of them that are prompts.
        """
        kinds, place = self.kinds(stages)
        times = self.tables.decode_s(kinds, queries.ravel(), context.ravel(), inputs.ravel())
        return times[:, place].reshape(*queries.shape, len(stages))

    def kinds(self, stages: tuple[Stage, ...]) -> tuple[StageKinds, list[int]]:
        """Kinds of a pipeline's stages, and which kind each stage is."""
        if stages not in self._pipelines:
            order = list(dict.fromkeys(self.tables.stage_kinds(stages)))
            place = [order.index(kind) for kind in self.tables.stage_kinds(stages)]
            self._pipelines[stages] = self.tables.kinds([stages]), place
        return self._pipelines[stages]

    def memory(
        self, stages: tuple[Stage, ...], kv_tokens: FloatArray, encode_tokens: FloatArray, rows: FloatArray
    ) -> MemoryPlan:
        """Bytes per rank of every stage; arguments as in `plan_memory`."""
        return plan_memory(
            self.model,
            stages,
            self.profile.dtype,
            kv_tokens=kv_tokens,
            encode_tokens=encode_tokens,
            decode_queries=rows,
        )


def make_estimates(
    throughput: FloatArray,
    latency: FloatArray,
    ttft: FloatArray,
    iterations: int,
    pool: FloatArray,
    cycle: FloatArray,
    memory: MemoryPlan,
) -> Estimates:
    """Estimates from a query's latency and time to first token; no iterations, no time between tokens."""
    tpot = (latency - ttft) / iterations if iterations else np.zeros_like(latency)
    return Estimates(
        throughput_per_s=throughput,
        latency_s=latency,
        ttft_s=ttft,
        tpot_s=np.where(np.isfinite(latency), tpot, np.inf),
        decode_batch_size=pool,
        cycle_s=cycle,
        memory=memory,
    )
