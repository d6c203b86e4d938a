"""Appending to the paged cache: every row lands in its slot, and nothing else changes."""

import pytest
import torch

from exegpt.kernels import append_kv, paged_decode_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows(num_rows: int, dtype: torch.dtype, seed: int, num_kv_heads: int = 3) -> torch.Tensor:
    return torch.randn(num_rows, num_kv_heads, 40, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.usefixtures("each_backend")
class TestAppend:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("page_size", [1, 5, 16])
    def test_round_trip(self, dtype: torch.dtype, page_size: int) -> None:
        num_pages, num_rows = 400 // page_size, 300  # rows enough for more than one thread
        slots = torch.randperm(num_pages * page_size, generator=torch.Generator().manual_seed(0))[:num_rows]
        key, value = rows(num_rows, dtype, 1), rows(num_rows, dtype, 2)
        k_pages = torch.full((num_pages, 3, page_size, 40), -7.0, dtype=dtype)
        v_pages = torch.full_like(k_pages, -8.0)
        append_kv(key, value, k_pages, v_pages, slots)
        by_slot = {int(slot): row for row, slot in enumerate(slots)}
        for slot in range(num_pages * page_size):
            page, offset = divmod(slot, page_size)
            row = by_slot.get(slot)
            expected_key = torch.full((3, 40), -7.0, dtype=dtype) if row is None else key[row]
            expected_value = torch.full((3, 40), -8.0, dtype=dtype) if row is None else value[row]
            assert torch.equal(k_pages[page, :, offset], expected_key)
            assert torch.equal(v_pages[page, :, offset], expected_value)

    def test_slices_of_a_fused_projection(self) -> None:
        fused = rows(4, torch.float32, 3, num_kv_heads=9)
        key, value = fused[:, 3:6], fused[:, 6:]
        k_pages, v_pages = torch.zeros(2, 3, 4, 40), torch.zeros(2, 3, 4, 40)
        append_kv(key, value, k_pages, v_pages, torch.tensor([5, 0, 7, 2]))
        assert torch.equal(k_pages[1, :, 1], key[0])
        assert torch.equal(v_pages[0, :, 2], value[3])

    def test_rows_whose_heads_are_transposed(self) -> None:
        key = rows(3, torch.float32, 4).transpose(0, 1).contiguous().transpose(0, 1)
        k_pages, v_pages = torch.zeros(1, 3, 4, 40), torch.zeros(1, 3, 4, 40)
        append_kv(key, key, k_pages, v_pages, torch.tensor([3, 1, 0]))
        assert torch.equal(k_pages[0, :, 1], key[1])

    def test_what_was_appended_is_what_decode_attends_to(self) -> None:
        value = rows(1, torch.float32, 5)
        k_pages, v_pages = torch.zeros(2, 3, 4, 40), torch.zeros(2, 3, 4, 40)
        append_kv(value, value, k_pages, v_pages, torch.tensor([4]))
        table, length = torch.tensor([[1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        # A softmax over one token is 1, so its value comes back.
        output = paged_decode_attention(rows(1, torch.float32, 6), k_pages, v_pages, table, length, 0.1)
        torch.testing.assert_close(output, value)

    def test_no_rows(self) -> None:
        k_pages = torch.ones(1, 3, 4, 40)
        empty = rows(0, torch.float32, 7)
        append_kv(empty, empty, k_pages, k_pages.clone(), torch.zeros(0, dtype=torch.int64))
        assert torch.equal(k_pages, torch.ones(1, 3, 4, 40))

    @pytest.mark.parametrize("slot", [-1, 8])
    def test_slot_outside_the_cache_is_refused_before_anything_is_written(self, slot: int) -> None:
        k_pages, v_pages = torch.zeros(2, 3, 4, 40), torch.zeros(2, 3, 4, 40)
        key = rows(2, torch.float32, 8)
        with pytest.raises(IndexError, match=rf"row 1 goes to slot {slot}, .*slots 0\.\.7"):
            append_kv(key, key, k_pages, v_pages, torch.tensor([0, slot]))
        assert not k_pages.any()
        assert not v_pages.any()


@pytest.mark.parametrize(
    "change",
    [
        {"key": torch.zeros(2, 2, 40)},
        {"value": torch.zeros(2, 3, 40, dtype=torch.bfloat16)},
        {"k_pages": torch.zeros(2, 3, 4, 48)},
        {"v_pages": torch.zeros(2, 3, 40, 4).transpose(2, 3)},
        {"slots": torch.zeros(2, dtype=torch.int32)},
        {"slots": torch.zeros(3, dtype=torch.int64)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, torch.Tensor]) -> None:
    given = {
        "key": torch.zeros(2, 3, 40),
        "value": torch.zeros(2, 3, 40),
        "k_pages": torch.zeros(2, 3, 4, 40),
        "v_pages": torch.zeros(2, 3, 4, 40),
        "slots": torch.tensor([0, 1]),
    }
    with pytest.raises(ValueError, match=r"It takes key and value \(n, num_kv_heads, head_dim\)"):
        append_kv(**(given | change))
