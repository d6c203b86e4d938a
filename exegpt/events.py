"""What happened when: records that the replay and the runtime both produce.

Times are seconds on one clock per job; zero is the start of the first encoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StageEvent:
    """One piece of work of one pipeline stage.

    Attributes
    ----------
    rank, stage : int
        First rank of the stage's tensor-parallel group, and the stage's place in the pipeline.
    phase : str
        `encode`, `decode`, or `mixed` (decoding rows and prompt chunks in one pass).
    cycle, iteration, micro_batch : int
        Number of the policy's step, decode iteration within it (0 for encoding), micro-batch.
    num_queries, num_tokens : int
        Rows of the micro-batch; prompt tokens encoded, or summed context tokens read by decoding, or both.
    start_s, end_s : float
        When the stage computed; waiting for input is not in it.
    """

    rank: int
    stage: int
    phase: str
    cycle: int
    iteration: int
    micro_batch: int
    num_queries: int
    num_tokens: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class RequestRecord:
    """The life of one request; the fields are those of `requests.jsonl`.

    `arrival_s` is when it could first be served, `encode_start_s` when its encoding began,
    `token_s` the time of every output token.
    """

    id: int
    input_tokens: int
    arrival_s: float = 0.0
    encode_start_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    status: str = "ok"
    error: str | None = None
    finish_reason: str | None = None

    @property
    def output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_s)

    @property
    def first_token_s(self) -> float | None:
        """Time of the first output token."""
        return self.token_s[0] if self.token_s else None

    @property
    def finish_s(self) -> float | None:
        """Time of the last output token so far."""
        return self.token_s[-1] if self.token_s else None
