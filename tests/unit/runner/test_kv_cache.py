"""Pages, their memory, and the live rows of a micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.errors import CapacityError, ConfigError
from exegpt.runner.kv_cache import BatchRows, KVCache, PageAllocator, PageError
from exegpt.specs import Dtype, ModelFamily, ModelSpec


def mask(*values: int) -> np.ndarray:
    return np.array(values, dtype=bool)


class TestPageAllocator:
    def test_a_row_grows_by_whole_pages(self) -> None:
        allocator = PageAllocator(num_pages=5, page_size=4)
        assert len(allocator.reserve(7, 4)) == 1
        assert allocator.reserve(7, 4) == []
        added = allocator.reserve(7, 9)
        assert len(added) == 2
        assert allocator.pages(7)[1:] == tuple(added)
        assert allocator.num_free == 2

    def test_released_pages_can_be_had_again(self) -> None:
        allocator = PageAllocator(num_pages=2, page_size=4)
        pages = allocator.reserve(1, 8)
        allocator.release(1)
        assert not allocator.owns(1)
        assert sorted(allocator.reserve(2, 8)) == sorted(pages)

    def test_too_few_pages_change_nothing(self) -> None:
        allocator = PageAllocator(num_pages=3, page_size=4)
        allocator.reserve(1, 5)
        with pytest.raises(
            CapacityError, match=r"2 more pages of 4 tokens .*row 1 with 13 tokens.* 1 of 3 are free"
        ):
            allocator.reserve(1, 13)
        with pytest.raises(CapacityError, match=r"Lower the batch sizes"):
            allocator.reserve(2, 5)
        assert len(allocator.pages(1)) == 2
        assert not allocator.owns(2)
        allocator.check()

    @pytest.mark.parametrize("released_before", [False, True])
    def test_a_row_without_pages_cannot_be_released(self, released_before: bool) -> None:
        allocator = PageAllocator(num_pages=1, page_size=4)
        if released_before:
            allocator.reserve(3, 1)
            allocator.release(3)
        with pytest.raises(PageError, match=r"row 3 holds no pages"):
            allocator.release(3)
        with pytest.raises(PageError, match=r"row 3 holds no pages"):
            allocator.pages(3)

    @pytest.mark.parametrize(("num_pages", "page_size", "name"), [(0, 4, "num_pages"), (4, 0, "page_size")])
    def test_sizes_are_checked(self, num_pages: int, page_size: int, name: str) -> None:
        with pytest.raises(ConfigError, match=f"{name}=0 must be at least 1"):
            PageAllocator(num_pages, page_size)

    def test_check_finds_a_page_with_two_owners(self) -> None:
        allocator = PageAllocator(num_pages=2, page_size=4)
        allocator.reserve(1, 1)
        allocator._owned[2] = [allocator.pages(1)[0]]
        with pytest.raises(PageError, match=r"expected each of 2"):
            allocator.check()

    @settings(max_examples=200, deadline=None)
    @given(
        num_pages=st.integers(1, 12),
        page_size=st.integers(1, 5),
        moves=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=40),
    )
    def test_books_balance_after_any_moves(
        self, num_pages: int, page_size: int, moves: list[tuple[int, int]]
    ) -> None:
        allocator = PageAllocator(num_pages, page_size)
        held: dict[int, int] = {}
        for row_id, tokens in moves:
            if tokens == 0 and row_id in held:
                allocator.release(row_id)
                del held[row_id]
            elif tokens:
                pages = max(held.get(row_id, 0), -(-tokens // page_size))
                if pages - held.get(row_id, 0) <= num_pages - sum(held.values()):
                    allocator.reserve(row_id, tokens)
                    held[row_id] = pages
                else:
                    with pytest.raises(CapacityError):
                        allocator.reserve(row_id, tokens)
            allocator.check()
            assert allocator.num_free == num_pages - sum(held.values())
            assert {row: len(allocator.pages(row)) for row in held} == held


class TestKVCache:
    def test_each_layer_has_keys_and_values(self) -> None:
        cache = KVCache(3, 5, 4, 2, 8, torch.bfloat16, "cpu")
        assert len(cache.k) == len(cache.v) == 3
        assert {pages.shape for pages in (*cache.k, *cache.v)} == {(5, 2, 4, 8)}
        assert all(pages.is_contiguous() and pages.dtype == torch.bfloat16 for pages in (*cache.k, *cache.v))
        assert cache.num_bytes == sum(pages.nbytes for pages in (*cache.k, *cache.v))
        assert cache.num_bytes == 5 * KVCache.bytes_per_page(3, 4, 2, 8, torch.bfloat16)

    def test_a_page_has_the_bytes_that_the_model_counts(self) -> None:
        model = ModelSpec(
            name="m",
            family=ModelFamily.LLAMA,
            num_hidden_layers=6,
            hidden_size=64,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=8,
            intermediate_size=64,
            vocab_size=100,
            max_position_embeddings=64,
        )
        counted = 16 * model.kv_bytes_per_token(Dtype.float16, num_layers=2, tp_size=2)
        assert KVCache.bytes_per_page(2, 16, 2, 8, torch.float16) == counted

    def test_more_than_the_device_has_is_a_capacity_error(self) -> None:
        with pytest.raises(CapacityError, match=r"bytes \(1099511627776 pages of 16 tokens in 2 layers\)"):
            KVCache(2, 2**40, 16, 8, 128, torch.float32, "cpu")


class TestBatchRows:
    def test_a_prompt_goes_to_its_own_pages(self) -> None:
        allocator = PageAllocator(10, 4)
        rows = BatchRows(allocator, capacity=4, max_pages=3)
        prompt = rows.add([5, 9], [6, 3])
        assert prompt.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
        expected = [allocator.pages(5)[i // 4] * 4 + i % 4 for i in range(6)]
        expected += [allocator.pages(9)[0] * 4 + i for i in range(3)]
        assert prompt.slots.tolist() == expected
        assert prompt.slots.dtype == prompt.positions.dtype == torch.int64
        assert rows.add([1], [2]).positions.tolist() == [0, 1]
        assert rows.row_ids.tolist() == [5, 9, 1]
        assert rows.stored_tokens.tolist() == [6, 3, 2]

    def test_the_next_token_takes_the_next_slot(self) -> None:
        allocator = PageAllocator(10, 4)
        rows = BatchRows(allocator, capacity=2, max_pages=3)
        rows.add([5, 9], [4, 2])
        for step in range(6):
            rows.advance()
            assert rows.positions.tolist() == [4 + step, 2 + step]
            assert rows.context_lens.tolist() == [5 + step, 3 + step]
            for row, (row_id, position) in enumerate(zip([5, 9], rows.positions.tolist(), strict=True)):
                pages = allocator.pages(row_id)
                assert len(pages) == position // 4 + 1
                assert rows.page_table[row, : len(pages)].tolist() == list(pages)
                assert int(rows.slots[row]) == pages[-1] * 4 + position % 4
        assert rows.page_table.shape == (2, 3)
        assert rows.page_table.dtype == rows.context_lens.dtype == torch.int32
        assert rows.slots.dtype == rows.positions.dtype == torch.int64

    def test_frozen_rows_stay_where_they_are(self) -> None:
        allocator = PageAllocator(4, 4)
        rows = BatchRows(allocator, capacity=2, max_pages=2)
        rows.add([1, 2], [4, 4])
        rows.advance(frozen=mask(1, 0))
        assert rows.positions.tolist() == [3, 4]
        assert rows.context_lens.tolist() == [4, 5]
        assert int(rows.slots[0]) == allocator.pages(1)[0] * 4 + 3
        assert len(allocator.pages(1)) == 1
        assert rows.stored_tokens.tolist() == [4, 5]

    def test_live_rows_close_up_in_order(self) -> None:
        allocator = PageAllocator(10, 4)
        rows = BatchRows(allocator, capacity=4, max_pages=2)
        rows.add([4, 8, 6, 2], [3, 5, 2, 7])
        pages = {row_id: allocator.pages(row_id) for row_id in (8, 2)}
        assert rows.keep(mask(0, 1, 0, 1)) == [4, 6]
        assert rows.row_ids.tolist() == [8, 2]
        rows.advance()
        assert rows.positions.tolist() == [5, 7]
        assert rows.page_table.tolist() == [list(pages[8]), list(pages[2])]
        assert allocator.num_free == 6
        assert rows.keep(mask(1, 1)) == []

    def test_all_rows_may_leave(self) -> None:
        allocator = PageAllocator(4, 4)
        rows = BatchRows(allocator, capacity=1, max_pages=2)
        rows.add([1], [2])
        rows.keep(mask(0))
        assert len(rows) == 0
        rows.advance()
        assert rows.slots.shape == rows.positions.shape == rows.context_lens.shape == (0,)
        assert allocator.num_free == 4

    def test_released_rows_give_their_pages_back_once(self) -> None:
        allocator = PageAllocator(3, 4)
        rows = BatchRows(allocator, capacity=3, max_pages=2)
        rows.add([1, 2, 3], [2, 2, 2])
        assert rows.release([2, 7]) == [2]
        assert rows.release([2]) == []
        assert rows.row_ids.tolist() == [1, 2, 3]
        other = BatchRows(allocator, capacity=3, max_pages=2)
        other.add([2], [4])
        with pytest.raises(PageError, match=r"rows \[2\] gave their pages back"):
            rows.advance()
        assert rows.keep(mask(0, 0, 1)) == [1]
        assert allocator.owns(2)
        rows.advance()
        assert rows.keep(mask(0)) == [3]
        assert allocator.num_free == 2

    def test_add_without_room_changes_nothing(self) -> None:
        allocator = PageAllocator(3, 4)
        rows = BatchRows(allocator, capacity=3, max_pages=2)
        rows.add([1], [5])
        with pytest.raises(CapacityError, match=r"2 more pages .*2 prompts of 4 tokens.* 1 of 3 are free"):
            rows.add([2, 3], [2, 2])
        with pytest.raises(CapacityError, match=r"row of 9 tokens does not fit in 2 pages of 4 tokens"):
            rows.add([2], [9])
        with pytest.raises(CapacityError, match=r"1 rows live and 3 come, but the micro-batch holds 3"):
            rows.add([2, 3, 4], [1, 1, 1])
        assert rows.row_ids.tolist() == [1]
        assert allocator.num_free == 1

    def test_advance_without_room_changes_nothing(self) -> None:
        allocator = PageAllocator(3, 4)
        rows = BatchRows(allocator, capacity=2, max_pages=2)
        rows.add([1, 2], [4, 4])
        with pytest.raises(CapacityError, match=r"next tokens of 2 rows"):
            rows.advance()
        assert allocator.num_free == 1
        assert rows.stored_tokens.tolist() == [4, 4]
        rows.keep(mask(1, 0))
        for _ in range(4):
            rows.advance()
        with pytest.raises(CapacityError, match=r"row of 9 tokens does not fit in 2 pages"):
            rows.advance()
        assert rows.stored_tokens.tolist() == [8]

    def test_misuse_is_told(self) -> None:
        allocator = PageAllocator(4, 4)
        rows = BatchRows(allocator, capacity=4, max_pages=2)
        rows.add([1], [2])
        with pytest.raises(PageError, match=r"\[1\] are added twice"):
            rows.add([1], [2])
        with pytest.raises(PageError, match=r"added twice"):
            rows.add([2, 2], [1, 1])
        with pytest.raises(PageError, match=r"row 3 is empty"):
            rows.add([2, 3], [1, 0])
        with pytest.raises(PageError, match=r"shape \(2,\) was given for 1 rows"):
            rows.keep(mask(1, 0))
        with pytest.raises(PageError, match=r"shape \(2,\) was given for 1 rows"):
            rows.advance(frozen=mask(1, 0))
        assert allocator.num_free == 3

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_slots_stay_apart_whatever_comes_and_leaves(self, data: st.DataObject) -> None:
        """Two micro-batches on one allocator: a slot holds one token, found again through the page table."""
        page_size = data.draw(st.integers(1, 4))
        allocator = PageAllocator(60, page_size)
        batches = [BatchRows(allocator, capacity=8, max_pages=20) for _ in range(2)]
        written: dict[int, tuple[int, int]] = {}
        next_id = 0
        for _ in range(data.draw(st.integers(1, 12))):
            rows = data.draw(st.sampled_from(batches))
            new = data.draw(st.lists(st.integers(1, 6), max_size=2))
            ids = list(range(next_id, next_id + len(new)))
            next_id += len(new)
            try:
                prompt = rows.add(ids, new)
                owners = np.repeat(ids, new).tolist()
                places = zip(owners, prompt.positions.tolist(), prompt.slots.tolist(), strict=True)
                written |= {slot: (owner, position) for owner, position, slot in places}
                rows.advance()
            except CapacityError:
                continue
            for row, row_id in enumerate(rows.row_ids.tolist()):
                written[int(rows.slots[row])] = (row_id, int(rows.positions[row]))
                for position in range(int(rows.context_lens[row])):
                    page = int(rows.page_table[row, position // page_size])
                    assert written[page * page_size + position % page_size] == (row_id, position)
            keep = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
            rows.keep(np.array(keep, dtype=bool))
            allocator.check()
        live = sum(len(allocator.pages(row_id)) for rows in batches for row_id in rows.row_ids.tolist())
        assert allocator.num_free == 60 - live
