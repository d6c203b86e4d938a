"""Bounds over boxes of WAA and DISAGGREGATED candidates, for thousands of choices at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exegpt.profiler.grid import FloatArray
from exegpt.schedule import Stage
from exegpt.simulator.choice import Bounds, Choice, IntArray
from exegpt.simulator.forms.counted_batches import batch_encode_upper_s
from exegpt.simulator.forms.decode_pool import DecodePools, Pools, between, meeting_point, pipeline_key
from exegpt.simulator.memory import OVERFLOW_SIGMAS
from exegpt.simulator.serving import Serving
from exegpt.simulator.transfer import Transfer, make_transfer


@dataclass(frozen=True, slots=True)
class Prepared:
    """What bounds need of every choice; arrays by choice, tables by pipeline.

    Attributes
    ----------
    encode, decode : int arrays, shape (choices,)
        Row of each choice's pipelines in the tables.
    encode_stages : list of tuples of Stage
        A pipeline for each row.
    encode_bytes, decode_bytes : float arrays, shape (pipelines, stages, 4)
        Bytes of a rank: fixed, per K/V token, per token encoded at once, per row sampled at once.
    pools : Pools
        Arrays of shape (decode pipelines, NUM_POOLS).
    """

    choices: Sequence[Choice]
    encode: IntArray
    decode: IntArray
    encode_stages: list[tuple[Stage, ...]]
    encode_bytes: FloatArray
    decode_bytes: FloatArray
    pools: Pools
    transfer: Transfer
    num_encode_stages: IntArray
    num_micro_batches: IntArray
    num_replicas: IntArray
    num_encode_instances: IntArray
    num_decode_instances: IntArray


def prepare(serving: Serving, pools: DecodePools, choices: Sequence[Choice]) -> Prepared:
    """Tables for choices of one policy."""
    encode_keys = [pipeline_key(c.encode_stages) for c in choices]
    decode_keys = [(pipeline_key(c.decode_stages), c.num_micro_batches) for c in choices]
    encode_stages = {key: c.encode_stages for key, c in zip(encode_keys, choices, strict=True)}
    decode = {key: c for key, c in zip(decode_keys, choices, strict=True)}
    found = [pools.of(c.decode_stages, c.num_micro_batches) for c in decode.values()]
    first = make_transfer(
        serving.profile, serving.model, choices[0].policy, choices[0].encode_stages, choices[0].decode_stages
    )
    encode_bytes = _bytes(serving, list(encode_stages.values()))
    decode_bytes = _bytes(serving, [c.decode_stages for c in decode.values()])
    at_encode = _rows(encode_keys, list(encode_stages))
    at_decode = _rows(decode_keys, list(decode))
    return Prepared(
        choices=choices,
        encode=at_encode,
        decode=at_decode,
        encode_stages=list(encode_stages.values()),
        encode_bytes=encode_bytes,
        decode_bytes=decode_bytes,
        pools=Pools(*(np.stack([getattr(p, name) for p in found]) for name in Pools.__dataclass_fields__)),
        transfer=Transfer(
            first.grid,
            encode_bytes[at_encode, :, 1].max(-1),
            decode_bytes[at_decode, :, 1].max(-1),
            first.through_host,
        ),
        num_encode_stages=np.asarray([len(c.encode_stages) for c in choices]),
        num_micro_batches=np.asarray([c.num_micro_batches for c in choices]),
        num_replicas=np.asarray([c.num_replicas for c in choices]),
        num_encode_instances=np.asarray([c.num_encode_instances for c in choices]),
        num_decode_instances=np.asarray([c.num_decode_instances for c in choices]),
    )


def _rows(keys: Sequence[object], table: list[object]) -> IntArray:
    place = {key: row for row, key in enumerate(table)}
    return np.asarray([place[key] for key in keys], dtype=np.int64)


def _bytes(serving: Serving, pipelines: list[tuple[Stage, ...]]) -> FloatArray:
    """Coefficients of `plan_memory`, which is linear in its amounts; stages that are missing take none."""
    unit = np.eye(4)
    table = np.zeros((len(pipelines), max(map(len, pipelines)), 4))
    for row, stages in zip(table, pipelines, strict=True):
        total = serving.memory(stages, unit[1], unit[2], unit[3]).total_bytes
        row[: len(stages)] = np.concatenate([total[:1], total[1:] - total[0]]).T
    return table


def sides_bounds(
    serving: Serving, pools: DecodePools, prepared: Prepared, which: IntArray, batches: IntArray
) -> Bounds:
    """Bounds of boxes that hold B_E from `batches[i, 0]` to `batches[i, 1]` of choice `which[i]`.

    Notes
    -----
    Every cost of a profile is monotone (tables are isotone), and so are T(B), the passage of an iteration
    and the K/V tokens of a pool in B. Write b, b' for the least and greatest B_E of the box.

    Throughput. The inflow of a candidate is at most b' over the time that stages and links need for b. The
    drain is at most that of the best pool that fits memory with the fewest queries under way, b of them,
    since a candidate's own pools fit beside at least as many. A candidate's throughput is its inflow or
    its drain, whichever is less.

    Pool. Let f be the least inflow, b over the time for b', and g the best drain of the pools that
    fit beside the most queries under way: those that the greatest inflow and the longest handover give,
    and b'. These pools fit every candidate of the box. A candidate whose encoding limits drains its
    inflow, at least f; one whose decoding limits has the best drain that fits, at least g. So every
    candidate's drain reaches t = min(f, g), and its pool is at least the least pool whose drain
    does. Within the interval where the drain first reaches t the pool rises with t (`meeting_point`).

    Latency. Encoding and transfer take at least as long as for b, an iteration at least T of that pool, and
    the last token at least an iteration's passage. What candidates add (waits between encode stages, the
    weight of the bound's own query) is not negative. Memory rises with pool and B_E.
    """
    low, high = batches.astype(np.float64).T
    share = (prepared.num_encode_instances / prepared.num_decode_instances)[which]
    with np.errstate(divide="ignore", invalid="ignore"):
        passage, every = _encode_s(serving, prepared, which, (low, low), share, upper=False)
        passage_most, every_most = _encode_s(serving, prepared, which, (low, high), share, upper=True)
        transfer = _transfer(prepared, which)
        handed = pools.moments.handed_tokens
        arrives, arrives_most = transfer.latency_s(low * handed), transfer.latency_s(high * handed)
        rows = prepared.decode[which]
        period, drain = prepared.pools.period_s[rows], prepared.pools.drain_per_s[rows]
        inflow_most = np.where(np.isfinite(every), share * high / every, 0.0)

        best = np.where(_fits(pools, prepared, rows, low[:, None]), drain, -1.0).max(-1)
        per_s = np.minimum(inflow_most, np.maximum(best, 0.0))

        rate = np.minimum(inflow_most[:, None], drain)
        handover = (passage_most + arrives_most)[:, None] + period / 2
        under = np.multiply(rate, handover, out=np.zeros_like(rate), where=rate > 0) + high[:, None]
        worst = np.where(_fits(pools, prepared, rows, under), drain, -1.0).max(-1)
        reached = np.minimum(share * low / every_most, worst)
        pool, least_s, last_s = _least_pool(pools, prepared, rows, reached)

        ends = serving.completion.iterations_of(serving.bound_output_tokens)
        joined = passage + arrives + least_s / 2
        latency = joined + (ends - 1) * least_s + last_s if ends else passage
        ttft = joined + last_s if serving.model.is_encoder_decoder and ends else passage
    return Bounds(
        throughput_upper_per_s=prepared.num_replicas[which] * prepared.num_decode_instances[which] * per_s,
        latency_lower_s=np.asarray(latency),
        ttft_lower_s=np.asarray(ttft),
        memory_lower_bytes=_memory(serving, pools, prepared, which, low, pool),
    )


def _transfer(prepared: Prepared, which: IntArray) -> Transfer:
    whole = prepared.transfer
    source, target = np.asarray(whole.source_bytes)[which], np.asarray(whole.target_bytes)[which]
    return Transfer(whole.grid, source, target, whole.through_host)


def _encode_s(
    serving: Serving,
    prepared: Prepared,
    which: IntArray,
    batches: tuple[FloatArray, FloatArray],
    share: FloatArray,
    *,
    upper: bool,
) -> tuple[FloatArray, FloatArray]:
    """Passage of a batch, and how often one can leave; each (n,).

    The greatest batch's, at least as long as that of any other; or with mean prompts, no longer than it is.
    """
    (low, batch), policy = batches, prepared.choices[0].policy
    passage, slowest = np.zeros((2, len(which)))
    pipelines = prepared.encode[which]
    for row in np.unique(pipelines):
        mine = np.flatnonzero(pipelines == row)
        stages = prepared.encode_stages[row]
        if upper:
            stage_s = batch_encode_upper_s(serving, policy, stages, low[mine], batch[mine])
        else:
            stage_s = serving.encode_s(stages, batch[mine])
        passage[mine], slowest[mine] = stage_s.sum(-1), stage_s.max(-1)
    transfer, tokens = _transfer(prepared, which), batch * serving.mean_input
    links = np.maximum(transfer.source_s(tokens), share * transfer.target_s(tokens))
    return passage, np.maximum(slowest, links)


def _fits(pools: DecodePools, prepared: Prepared, rows: IntArray, under_way: FloatArray) -> FloatArray:
    """Which pools memory holds beside so many queries under way, as in `SidesForm.estimate`."""
    held = prepared.pools.kv_tokens[rows] + pools.kv_tokens(np.zeros_like(under_way), under_way)
    fits = np.logical_and.accumulate(held <= prepared.pools.room_tokens[rows], axis=1)
    fits &= np.isfinite(prepared.pools.period_s[rows])
    fits[:, 0] = True
    return np.asarray(fits)


def _least_pool(
    pools: DecodePools, prepared: Prepared, rows: IntArray, reached: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The least pool whose drain reaches `reached`, with T and the passage there; each (n,)."""
    enough = prepared.pools.drain_per_s[rows] >= reached[:, None]
    at = np.where(enough.any(-1), enough.argmax(-1), 0)
    before = np.maximum(at - 1, 0)
    size, period, passage = (
        (getattr(prepared.pools, name)[rows, before], getattr(prepared.pools, name)[rows, at])
        for name in ("size", "period_s", "passage_s")
    )
    pool, part = meeting_point(reached * pools.moments.mean_iterations, *size, *period)
    return np.maximum(pool, 0.0), between(*period, part), between(*passage, part)


def _memory(
    serving: Serving,
    pools: DecodePools,
    prepared: Prepared,
    which: IntArray,
    batch: FloatArray,
    pool: FloatArray,
) -> FloatArray:
    """Bytes of the fullest GPU with this B_E and pool and the fewest queries under way, (n,)."""
    prompts = encode_kv_tokens(serving, prepared.num_encode_stages[which], batch)
    encode = np.stack([np.ones_like(batch), prompts, batch * serving.mean_input, batch], axis=-1)
    # At least half a batch is under way: see `SidesForm.estimate`.
    kv_tokens = pools.kv_tokens(np.nan_to_num(pool), (batch - 1) / 2)
    sampled = np.maximum(np.nan_to_num(pool) / prepared.num_micro_batches[which], 1.0)
    decode = np.stack([np.ones_like(batch), kv_tokens, np.zeros_like(batch), sampled], axis=-1)
    on_encode = (prepared.encode_bytes[prepared.encode[which]] * encode[:, None, :]).sum(-1).max(-1)
    on_decode = (prepared.decode_bytes[prepared.decode[which]] * decode[:, None, :]).sum(-1).max(-1)
    return np.asarray(np.maximum(on_encode, on_decode))


def encode_kv_tokens(serving: Serving, num_stages: IntArray | int, batch: FloatArray) -> FloatArray:
    """K/V tokens on an encode stage: of the batches in the pipeline and of one that is being taken away."""
    in_flight = (num_stages + 1) * batch
    reserve = OVERFLOW_SIGMAS * np.sqrt(in_flight) * serving.lengths.std_input
    return np.asarray(in_flight * (serving.mean_input + (serving.page_size - 1) / 2) + reserve)
