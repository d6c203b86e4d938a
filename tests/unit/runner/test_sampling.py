"""Tokens drawn from logits that may be split over ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lockstep import LockstepGroup

from exegpt.errors import ConfigError
from exegpt.runner.models import TensorParallel
from exegpt.runner.sampling import SamplingSpec, sample, uniforms

GREEDY = SamplingSpec()
SINGLE = TensorParallel.single()


def sample_split(logits: torch.Tensor, size: int, spec: SamplingSpec) -> list[list[int]]:
    """Tokens that each of `size` ranks gets from its share of the columns."""
    width = -(-logits.shape[1] // size)
    padded = torch.nn.functional.pad(logits, (0, size * width - logits.shape[1]), value=-math.inf)
    ids = range(len(logits))

    def rank_main(tp: TensorParallel) -> list[int]:
        shard = padded[:, tp.rank * width : (tp.rank + 1) * width]
        return sample(shard, tp.rank * width, tp, spec, ids, ids).tolist()

    return LockstepGroup(size).run(rank_main)


def draws(logits: torch.Tensor, spec: SamplingSpec, num_draws: int) -> np.ndarray:
    """Tokens of `num_draws` requests with the same logits."""
    rows = logits.expand(num_draws, -1)
    tokens = sample(rows, 0, SINGLE, spec, range(num_draws), [0] * num_draws)
    assert tokens.dtype == torch.int64
    return tokens.numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_greedy_takes_what_argmax_takes(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    # In bfloat16 many of 1000 logits are equal, so ties within and across shards are covered.
    logits = torch.randn(32, 1001, generator=generator).to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample_split(logits, size, GREEDY) == [expected] * size


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 2.0, 1.0, 2.0, 0.0], [3.0] * 7])
    assert sample_split(logits, 3, GREEDY) == [[2, 0]] * 3


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(4))
    ids = range(16)
    cold = sample(logits, 0, SINGLE, SamplingSpec(temperature=1e-300), ids, ids)
    assert cold.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_tokens_follow_the_tempered_distribution(temperature: float) -> None:
    logits = torch.tensor([[1.0, -math.inf, 0.0, 2.0, -1.0]])
    num_draws = 20_000
    counts = np.bincount(draws(logits, SamplingSpec(temperature=temperature, seed=5), num_draws), minlength=5)
    weights = np.exp(np.array([1.0, -np.inf, 0.0, 2.0, -1.0]) / temperature)
    expected = num_draws * weights / weights.sum()
    assert counts[1] == 0
    seen = expected > 0
    chi_square = float((((counts - expected)[seen]) ** 2 / expected[seen]).sum())
    # 99.9 % quantile of chi square with 3 degrees of freedom.
    assert chi_square < 16.27


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]])
    num_draws = 20_000
    spec = SamplingSpec(temperature=1.0, top_p=0.6, seed=6)
    counts = np.bincount(draws(probabilities.log(), spec, num_draws), minlength=5)
    # 0.4 alone is less than 0.6, 0.4 + 0.3 is more; they are drawn 4 to 3.
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    expected = num_draws * 4 / 7
    assert abs(counts[1] - expected) < 4 * math.sqrt(expected * 3 / 7)


def test_top_p_keeps_ties_at_its_edge() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, -9.0]])
    spec = SamplingSpec(temperature=1.0, top_p=0.3, seed=7)
    assert set(draws(logits, spec, 500).tolist()) == {0, 1, 2, 3}


def test_a_tiny_top_p_is_greedy() -> None:
    logits = torch.randn(16, 5000, generator=torch.Generator().manual_seed(8))
    ids = range(16)
    narrow = sample(logits, 0, SINGLE, SamplingSpec(temperature=1.0, top_p=1e-9), ids, ids)
    assert narrow.tolist() == logits.argmax(-1).tolist()


def test_top_p_of_flat_logits_looks_beyond_its_first_candidates() -> None:
    vocab_size, top_p = 5000, 0.9
    # Falling slowly: 0.9 of the mass takes most of the vocabulary.
    logits = -torch.arange(vocab_size, dtype=torch.float32)[None] / 2000
    drawn = draws(logits, SamplingSpec(temperature=1.0, top_p=top_p, seed=9), 3000)
    cumulated = logits.double().softmax(-1).cumsum(-1)[0]
    num_kept = int((cumulated < top_p).sum()) + 1
    assert num_kept > 256 * 8
    assert drawn.max() < num_kept
    assert drawn.max() > 0.98 * num_kept


@pytest.mark.parametrize(
    "spec", [SamplingSpec(temperature=1.3, seed=1), SamplingSpec(temperature=0.8, top_p=0.7, seed=2)]
)
def test_a_draw_depends_on_request_and_step_alone(spec: SamplingSpec) -> None:
    logits = torch.randn(24, 3000, generator=torch.Generator().manual_seed(10))
    requests, steps = list(range(100, 124)), [i % 5 for i in range(24)]
    together = sample(logits, 0, SINGLE, spec, requests, steps).tolist()
    alone = [
        int(sample(logits[i : i + 1], 0, SINGLE, spec, requests[i : i + 1], steps[i : i + 1]))
        for i in range(24)
    ]
    order = list(reversed(range(24)))
    shuffled = sample(logits[order], 0, SINGLE, spec, [requests[i] for i in order], [steps[i] for i in order])
    assert alone == together
    assert shuffled.tolist() == together[::-1]


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_draw_what_one_rank_draws(size: int) -> None:
    logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(12))
    spec = SamplingSpec(temperature=1.0, top_p=0.95, seed=13)
    expected = sample(logits, 0, SINGLE, spec, range(8), range(8)).tolist()
    assert sample_split(logits, size, spec) == [expected] * size


def test_uniforms_are_uniform_and_differ_in_every_key() -> None:
    drawn = uniforms(21, range(4000), [3] * 4000).numpy()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # Kolmogorov's statistic, 99.9 % quantile 1.95 / sqrt(n).
    ranks = np.arange(1, 4001) / 4000
    assert np.abs(np.sort(drawn) - ranks).max() < 1.95 / math.sqrt(4000)
    by_step = uniforms(21, [0] * 4000, range(4000)).numpy()
    assert abs(np.corrcoef(drawn, by_step)[0, 1]) < 0.06
    keys = [
        (seed, request, step)
        for seed in (0, 2**64 - 1)
        for request in (-1, 0, 2**40)
        for step in (0, 1, 10**6)
    ]
    values = [float(uniforms(seed, [request], [step])) for seed, request, step in keys]
    assert len(set(values)) == len(keys)
    assert float(uniforms(21, [17], [3])) == drawn[17]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"temperature": -0.1},
            r"runner\.sampling\.temperature=-0\.1: must be a finite number of at least 0",
        ),
        ({"temperature": math.inf}, r"runner\.sampling\.temperature=inf"),
        ({"temperature": math.nan}, r"runner\.sampling\.temperature=nan"),
        ({"top_p": 0.0}, r"runner\.sampling\.top_p=0\.0: must lie in \(0, 1\]"),
        ({"top_p": 1.01}, r"runner\.sampling\.top_p=1\.01"),
        ({"seed": -1}, r"runner\.sampling\.seed=-1: must lie in 0"),
        ({"seed": 2**64}, r"runner\.sampling\.seed="),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingSpec(**values)
