"""Encode attention against a naive causal computation in float64."""

import numpy as np
import pytest
import torch

from exegpt.kernels import encode_attention

# torch computes bfloat16 attention with weights rounded to 8 bits, so single values are off by a
# few units there; float32 is left with the rounding of its sums.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6}}


def naive(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, lengths: list[int], scale: float
) -> np.ndarray:
    output = np.empty_like(query)
    group = query.shape[1] // key.shape[1]
    start = 0
    for length in lengths:
        for token in range(start, start + length):
            for head in range(query.shape[1]):
                scores = key[start : token + 1, head // group] @ query[token, head] * scale
                weights = np.exp(scores - scores.max())
                output[token, head] = weights @ value[start : token + 1, head // group] / weights.sum()
        start += length
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [1, 33, 33, 5, 33, 1, 1], [70]], ids=str)
def test_against_naive(dtype: torch.dtype, num_heads: int, num_kv_heads: int, lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (
        torch.from_numpy(rng.normal(size=(sum(lengths), heads, 32))).to(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    output = encode_attention(query, key, value, lengths, 0.2)
    expected = naive(*(t.double().numpy() for t in (query, key, value)), lengths, 0.2)
    assert output.is_contiguous()
    np.testing.assert_allclose(output.double().numpy(), expected, **TOLERANCE[dtype])


def test_a_prompt_is_not_touched_by_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(1)
    fused = torch.randn(30, 10, 16, generator=generator)  # rows strided, as of one projection
    query, key, value = fused[:, :6], fused[:, 6:8], fused[:, 8:]
    together = encode_attention(query, key, value, [10, 10, 10], 0.25)
    alone = encode_attention(query[10:20], key[10:20], value[10:20], [10], 0.25)
    torch.testing.assert_close(together[10:20], alone)


def test_no_prompts() -> None:
    assert encode_attention(
        torch.zeros(0, 4, 8), torch.zeros(0, 2, 8), torch.zeros(0, 2, 8), [], 1.0
    ).shape == (0, 4, 8)


@pytest.mark.parametrize("lengths", [[3, 3], [5, 0], [6, -1], []], ids=str)
def test_lengths_that_do_not_cover_the_tokens_are_refused(lengths: list[int]) -> None:
    query, key = torch.zeros(5, 4, 8), torch.zeros(5, 2, 8)
    with pytest.raises(ValueError, match="lengths of at least 1 that sum to n"):
        encode_attention(query, key, key, lengths, 1.0)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads a multiple of num_kv_heads"):
        encode_attention(torch.zeros(5, 4, 8), torch.zeros(5, 3, 8), torch.zeros(5, 3, 8), [5], 1.0)
