"""Who owns which page of the K/V cache: integers only."""

from __future__ import annotations

from exegpt.errors import CapacityError, ConfigError, ExeGPTError


class PageError(ExeGPTError):
    """Pages were asked for, or given back, against the books."""


class PageAllocator:
    """Deals pages to rows; integers only.

    Parameters
    ----------
    num_pages, page_size : int
        Pages there are, and tokens that each holds; at least 1.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ConfigError(f"K/V cache: {name}={value} must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack with page 0 on top: pages just given back, still in the processor's cache, go first.
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def num_needed(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens of one row."""
        return -(-tokens // self.page_size)

    def owns(self, row_id: int) -> bool:
        """Whether the row holds pages."""
        return row_id in self._owned

    def pages(self, row_id: int) -> tuple[int, ...]:
        """Pages of a row, in the order of its tokens; PageError if it has none."""
        if row_id not in self._owned:
            raise PageError(f"K/V row {row_id} holds no pages: it was never reserved, or released already")
        return tuple(self._owned[row_id])

    def check_free(self, num_pages: int, purpose: str) -> None:
        """Raise CapacityError unless `num_pages` pages are free; `purpose` says in the message for what."""
        if num_pages > len(self._free):
            raise CapacityError(
                f"K/V cache: {num_pages} more pages of {self.page_size} tokens are needed for {purpose}, but "
                f"{len(self._free)} of {self.num_pages} are free. Lower the batch sizes of the schedule, or "
                "give the cache more memory (cluster.memory_gib)."
            )

    def reserve(self, row_id: int, tokens: int) -> list[int]:
        """Grow a row, new or known, so that it holds `tokens` tokens.

        Returns
        -------
        list of int
            The pages added, none if the row held enough.

        Raises
        ------
        CapacityError
            If too few pages are free; nothing has changed then.
        """
        owned = self._owned.get(row_id, [])
        missing = self.num_needed(tokens) - len(owned)
        if missing <= 0:
            return []
        self.check_free(missing, f"row {row_id} with {tokens} tokens")
        added = [self._free.pop() for _ in range(missing)]
        self._owned[row_id] = owned + added
        return added

    def release(self, row_id: int) -> None:
        """Take all pages of a row back; PageError if it holds none."""
        self._free.extend(reversed(self.pages(row_id)))
        del self._owned[row_id]

    def check(self) -> None:
        """Raise PageError unless every page is free once or owned once."""
        everywhere = sorted(self._free + [page for pages in self._owned.values() for page in pages])
        if everywhere != list(range(self.num_pages)):
            raise PageError(
                f"K/V cache: {len(everywhere)} pages are free or owned, expected each of {self.num_pages}"
            )
