"""STATIC_HYBRID: static batches encoded in more micro-batches than they decode in (DeepSpeed-Inference)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from exegpt.errors import ConfigError
from exegpt.policies.base import Step, View
from exegpt.policies.static import Static


@dataclass(frozen=True, slots=True)
class StaticHybrid:
    """STATIC whose encode phase has `encode_micro_batches`, a multiple of the decode micro-batches.

    Small micro-batches fill the pipeline when prompts make each of them long enough; decoding, which
    reads all weights for every micro-batch, takes fewer of them.
    """

    batch_size: int
    encode_micro_batches: int

    def next_step(self, view: View) -> Step | None:
        """As STATIC, the prompts in parts."""
        step = Static(self.batch_size).next_step(view)
        if step is None:
            return None
        return replace(step, encode_splits=encode_splits(self.encode_micro_batches, len(step.encode)))


def encode_splits(encode_micro_batches: int, num_micro_batches: int) -> int:
    """Encode micro-batches per decode micro-batch.

    Raises
    ------
    ConfigError
        If they do not divide.
    """
    splits, rest = divmod(encode_micro_batches, num_micro_batches)
    if rest or splits < 1:
        raise ConfigError(
            f"encode_micro_batches={encode_micro_batches} must be a multiple of "
            f"num_micro_batches={num_micro_batches}: every decode micro-batch is encoded in equally many "
            "parts. Change one of the two in the schedule's knobs."
        )
    return splits
