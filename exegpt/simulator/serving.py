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
from exegpt.simulator.memory import MemoryPlan, plan_memory
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
        self.completion = Completion(lengths, counting)
        self.bound_output_tokens = lengths.output_percentile(length_percentile)
        # Moments are sums over the pmfs; the search asks for them thousands of times.
        self.mean_input = lengths.mean_input
        self.rms_input = float(np.sqrt(lengths.mean_square_input))
        self._costs: dict[tuple[Stage, ...], StageCosts] = {}

    def costs(self, stages: tuple[Stage, ...]) -> StageCosts:
        """Stage costs of a pipeline."""
        if stages not in self._costs:
            self._costs[stages] = StageCosts(self.profile, self.model, stage_shapes(stages))
        return self._costs[stages]

    @cached_property
    def pool_moments(self) -> FloatArray:
        """Mean and variance of the pool's K/V tokens per encoded query, for every useful N_D."""
        most = max(self.completion.max_iterations, 1)
        moments = [self.completion.pool_tokens_moments(n) for n in range(1, most + 1)]
        return np.asarray(np.asarray(moments).T)

    def encode_s(self, stages: tuple[Stage, ...], queries: FloatArray) -> FloatArray:
        """Mean stage times to encode a micro-batch of `queries` prompts; shape (n, num_stages)."""
        return self.costs(stages).encode_s(queries, queries * self.mean_input, self.rms_input)

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
