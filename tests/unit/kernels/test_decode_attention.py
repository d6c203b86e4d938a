"""Paged decode attention against a naive computation in float64."""

import numpy as np
import pytest
import torch

from exegpt.kernels import paged_decode_attention, set_backend
from exegpt.kernels.native import BuildError
from exegpt.kernels.selection import announce_reference

# Inputs are rounded before both computations, so float32 is left with its own sums' rounding, and
# the short types with the rounding of the output, half a unit of their last place.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 1e-5},
}


class Cache:
    """A paged cache whose pages lie shuffled, with NaN wherever no row has a token."""

    def __init__(
        self,
        context_lens: list[int],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        max_pages = -(-max(context_lens) // page_size) + 1
        num_pages = len(context_lens) * max_pages + 3
        pages = rng.permutation(num_pages)[: len(context_lens) * max_pages].reshape(-1, max_pages)
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        self.k_pages = torch.full(shape, float("nan"), dtype=dtype)
        self.v_pages = torch.full(shape, float("nan"), dtype=dtype)
        self.keys, self.values = [], []
        for row, length in enumerate(context_lens):
            key = torch.from_numpy(rng.normal(size=(length, num_kv_heads, head_dim))).to(dtype)
            value = torch.from_numpy(rng.normal(size=(length, num_kv_heads, head_dim))).to(dtype)
            for token in range(length):
                page = pages[row, token // page_size]
                self.k_pages[page, :, token % page_size] = key[token]
                self.v_pages[page, :, token % page_size] = value[token]
            self.keys.append(key.double().numpy())
            self.values.append(value.double().numpy())
            pages[row, -(-length // page_size) :] = 2**31 - 1  # garbage that nobody may follow
        self.page_table = torch.from_numpy(pages).to(torch.int32)
        self.context_lens = torch.tensor(context_lens, dtype=torch.int32)
        self.query = torch.from_numpy(rng.normal(size=(len(context_lens), num_heads, head_dim))).to(dtype)
        self.scale = head_dim**-0.5

    def attend(self) -> torch.Tensor:
        return paged_decode_attention(
            self.query, self.k_pages, self.v_pages, self.page_table, self.context_lens, self.scale
        )

    def expected(self) -> np.ndarray:
        query = self.query.double().numpy()
        output = np.empty_like(query)
        for row, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            for head in range(query.shape[1]):
                kv_head = head // (query.shape[1] // key.shape[1])
                scores = key[:, kv_head] @ query[row, head] * self.scale
                weights = np.exp(scores - scores.max())
                output[row, head] = weights @ value[:, kv_head] / weights.sum()
        return output


def check(cache: Cache) -> None:
    output = cache.attend()
    assert output.shape == cache.query.shape
    assert output.dtype == cache.query.dtype
    np.testing.assert_allclose(output.double().numpy(), cache.expected(), **TOLERANCE[output.dtype])


@pytest.mark.usefixtures("each_backend")
class TestAgainstNaive:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (8, 2), (16, 2)])
    def test_groups_and_head_dims(
        self, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int
    ) -> None:
        # One token, a page but one, a page, a page and one, several blocks of the kernel and a bit.
        lengths = [1, 15, 16, 17, 64, 191, 300]
        check(Cache(lengths, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("page_size", [1, 3, 7, 8, 32, 200])
    def test_page_sizes(self, dtype: torch.dtype, page_size: int) -> None:
        lengths = [1, page_size, page_size + 1, 2 * page_size, 137]
        check(
            Cache(lengths, num_heads=6, num_kv_heads=2, head_dim=64, page_size=page_size, dtype=dtype, seed=1)
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("head_dim", [8, 32, 40, 72, 80, 96, 256])
    @pytest.mark.parametrize("group", [1, 2, 5, 7])
    def test_other_head_dims_and_uneven_groups(self, dtype: torch.dtype, head_dim: int, group: int) -> None:
        check(Cache([1, 30, 50], num_heads=group, num_kv_heads=1, head_dim=head_dim, dtype=dtype, seed=2))

    def test_large_scores_do_not_overflow(self) -> None:
        cache = Cache([5, 200], num_heads=3, num_kv_heads=1, head_dim=64, seed=3)
        cache.query *= 1000  # scores of some thousands; exp of them is beyond float64, too
        # Scores carry float32's relative error, and the largest decides almost alone.
        np.testing.assert_allclose(cache.attend().numpy(), cache.expected(), rtol=1e-2, atol=1e-2)

    def test_maximum_that_rises_in_every_block_rescales_what_was_summed(self) -> None:
        cache = Cache([700], num_heads=3, num_kv_heads=1, head_dim=64, seed=4)
        ramp = torch.linspace(0.0, 2.0, 700)
        for token in range(700):
            page = int(cache.page_table[0, token // 16])
            cache.k_pages[page, 0, token % 16] = cache.query[0, 0] * ramp[token]
        cache.keys[0][:, 0] = (cache.query[0, 0] * ramp[:, None]).double().numpy()
        check(cache)

    def test_strided_query_as_from_a_fused_projection(self) -> None:
        cache = Cache([20, 40], num_heads=6, num_kv_heads=2, head_dim=64, seed=5)
        fused = torch.zeros(2, 10, 64)
        fused[:, :6] = cache.query
        cache.query = fused[:, :6]
        assert not cache.query.is_contiguous()
        check(cache)

    def test_nan_of_the_row_itself_stays_visible(self) -> None:
        cache = Cache([20, 20], num_heads=2, num_kv_heads=1, head_dim=64, seed=6)
        cache.k_pages[int(cache.page_table[0, 0]), 0, 3, 0] = float("nan")
        output = cache.attend()
        assert output[0].isnan().all()
        assert not output[1].isnan().any()

    def test_no_rows(self) -> None:
        cache = Cache([4], num_heads=2, num_kv_heads=1, head_dim=64)
        empty = paged_decode_attention(
            cache.query[:0],
            cache.k_pages,
            cache.v_pages,
            cache.page_table[:0],
            cache.context_lens[:0],
            cache.scale,
        )
        assert empty.shape == (0, 2, 64)

    @pytest.mark.parametrize("length", [0, -1, 49])
    def test_context_outside_its_pages_is_refused(self, length: int) -> None:
        cache = Cache([4, 20], num_heads=2, num_kv_heads=1, head_dim=64)  # 3 pages a row
        cache.context_lens[1] = length
        with pytest.raises(IndexError, match=rf"row 1 has a context of {length} .*Allowed are 1\.\.48"):
            cache.attend()

    @pytest.mark.parametrize("page", [-1, 9])
    def test_page_outside_the_cache_is_refused(self, page: int) -> None:
        cache = Cache([4, 20], num_heads=2, num_kv_heads=1, head_dim=64)  # 9 pages in all
        cache.page_table[1, 1] = page
        with pytest.raises(IndexError, match=r"row 1 .*pages 0\.\.8"):
            cache.attend()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backends_agree(dtype: torch.dtype) -> None:
    lengths = np.random.default_rng(7).integers(1, 400, size=24).tolist()
    cache = Cache(lengths, num_heads=9, num_kv_heads=3, head_dim=64, dtype=dtype, seed=8)
    set_backend("torch")
    plain = cache.attend()
    try:
        set_backend("c++")
    except BuildError as error:
        pytest.skip(str(error))
    # Sums that differ in float32's last place may be rounded to neighbours in bfloat16: a whole unit.
    rtol = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(cache.attend(), plain, rtol=rtol, atol=1e-5)


def test_number_of_threads_changes_no_bit() -> None:
    cache = Cache([1, 90, 33, 250], num_heads=9, num_kv_heads=3, head_dim=64, seed=9)
    before = torch.get_num_threads()
    outputs = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            outputs.append(cache.attend())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [(torch.float16, 64, "torch.float16"), (torch.float32, 20, "head_dim 20")],
)
def test_what_has_no_compiled_kernel_is_right_and_announced_once(
    dtype: torch.dtype, head_dim: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        set_backend("c++")
    except BuildError as error:
        pytest.skip(str(error))
    announce_reference.cache_clear()
    cache = Cache([3, 40], num_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype, seed=10)
    check(cache)
    check(cache)
    assert len(caplog.records) == 1
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("query", lambda t: t[0]),
        ("query", lambda t: t[:, :3]),
        ("query", lambda t: t.bfloat16()),
        ("query", lambda t: t.to("meta")),
        ("k_pages", lambda t: t[:, :, :8]),
        ("v_pages", lambda t: t[..., :32]),
        ("k_pages", lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)),
        ("page_table", lambda t: t.long()),
        ("page_table", lambda t: t[:1]),
        ("context_lens", lambda t: t.float()),
        ("context_lens", lambda t: t[:1]),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_their_shapes(name: str, broken) -> None:
    cache = Cache([4, 20], num_heads=4, num_kv_heads=2, head_dim=64)
    setattr(cache, name, broken(getattr(cache, name)))
    with pytest.raises(ValueError, match=rf"{name} \(.*It takes query \(b, num_heads, head_dim\)"):
        cache.attend()
