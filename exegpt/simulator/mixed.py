"""Stage times of a pass that carries decoding rows and prompt chunks together (chunked encoding).

Everything but attention is paid once for rows and chunk tokens together, which is what chunking is
for. A prompt chunk attends to its own prefix too: of the (end)^2 pairs that the prompt has so far, the
(start)^2 ones are done. With what a profile has, that is encode attention looked up at the chunk's end
minus that at its start, so a prompt's chunks together cost what the whole prompt would. The reading of
the cached prefix and a kernel's start are not in it.

Our choice: the pass has the longer of the two phases' overheads, and every row and every chunk
takes part in head and sampling (vLLM drops the logits of unfinished prompts after computing them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from exegpt.profiler.grid import FloatArray, Grid
from exegpt.simulator.costs import StageCosts


def mixed_one_s(
    costs: StageCosts, rows: int, context_tokens: int, chunks: Sequence[tuple[int, int]]
) -> list[float]:
    """Stage times of one pass.

    Parameters
    ----------
    rows, context_tokens : int
        Decoding queries and the tokens they attend to, summed.
    chunks : sequence of (start, end)
        Prompt tokens of each chunk, counted within its prompt.

    Raises
    ------
    ProfileRangeError
        Outside the profile.
    """
    queries, tokens = rows + len(chunks), rows + sum([end - start for start, end in chunks])
    row_bytes = costs.model.hidden_size * costs.profile.dtype.num_bytes
    layer = {}
    for tp_size in costs.degrees:
        table = costs.profile.layers[tp_size]
        layer[tp_size] = table.linear.at(tokens) + table.decode_attention.at(rows, context_tokens)
        layer[tp_size] += chunk_attention_s(table.encode_attention, chunks)
        if table.all_reduce is not None:
            layer[tp_size] += 2 * table.all_reduce.at(tokens * row_bytes)
    times = []
    for stage in costs.kinds:
        table = costs.profile.layers[stage.tp_size]
        time = stage.num_layers * layer[stage.tp_size]
        time += max(table.encode_overhead.at(len(chunks)), table.decode_overhead.at(rows))
        if stage.is_first:
            time += table.embed.at(tokens)
        if stage.is_last:
            time += table.head.at(queries)
        if len(costs.stages) > 1:
            time += costs.profile.send.at(queries * 8 if stage.is_last else tokens * row_bytes)
        times.append(time)
    return [times[kind] for kind in costs.kind_of_stage]


def chunk_attention_s(grid: Grid, chunks: Sequence[tuple[int, int]]) -> float:
    """Encode attention of one layer; prompts that begin in this pass are one batch, others go alone."""
    fresh = [end for start, end in chunks if start == 0]
    time = sum(grid.at(1, end) - grid.at(1, start) for start, end in chunks if start)
    whole, rest = divmod(len(fresh), int(grid.limit(0)))
    rms = math.sqrt(sum([end * end for end in fresh]) / len(fresh)) if fresh else 0.0
    return float(time + whole * grid.at(grid.limit(0), rms) + grid.at(rest, rms))


def mixed_s(
    costs: StageCosts,
    rows: FloatArray,
    context_tokens: FloatArray,
    chunk_tokens: FloatArray,
    num_chunks: FloatArray,
    attention_s: dict[int, FloatArray],
) -> FloatArray:
    """Mean stage times of passes, arrays of one shape (...); result (..., num_stages).

    `attention_s` is the chunks' encode attention of one layer, per tensor-parallel degree.
    """
    tokens, queries = rows + chunk_tokens, rows + num_chunks
    row_bytes = costs.model.hidden_size * costs.profile.dtype.num_bytes
    times = []
    for stage in costs.stages:
        table = costs.profile.layers[stage.tp_size]
        layer = table.linear.at_or_inf(tokens) + table.decode_attention.at_or_inf(rows, context_tokens)
        layer = layer + attention_s[stage.tp_size]
        if table.all_reduce is not None:
            layer = layer + 2 * table.all_reduce.at_or_inf(tokens * row_bytes)
        fixed = np.maximum(table.encode_overhead.at_or_inf(num_chunks), table.decode_overhead.at_or_inf(rows))
        time = stage.num_layers * layer + fixed
        if stage.is_first:
            time = time + table.embed.at_or_inf(tokens)
        if stage.is_last:
            time = time + table.head.at_or_inf(queries)
        if len(costs.stages) > 1:
            sent = queries * 8 if stage.is_last else tokens * row_bytes
            time = time + costs.profile.send.at_or_inf(sent)
        times.append(time)
    return np.stack(times, axis=-1)
