"""The next token of every row, from logits that are split by vocabulary over a group of ranks.

Greedy sampling moves two numbers per row and rank. With a temperature the whole rows are gathered,
and every rank draws the same token: a draw depends on the seed, the request and the number of its
token alone, never on the batch around it, the policy or how the model is split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exegpt.errors import ConfigError
from exegpt.runner.models.parallel import TensorParallel

# Most probable tokens looked at first; sorting whole vocabularies would cost more than the model.
FIRST_CANDIDATES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How tokens are drawn (`runner.sampling`).

    Attributes
    ----------
    temperature : float
        Divides the logits; 0 takes the most probable token.
    top_p : float
        Only the most probable tokens that together reach this probability are drawn.
    seed : int
        Of all draws.

    Raises
    ------
    ConfigError
        If a value is out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"runner.sampling.temperature={self.temperature}: must be a finite number of at least 0 "
                "(0 takes the most probable token)"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"runner.sampling.top_p={self.top_p}: must lie in (0, 1] (1 keeps all tokens)")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"runner.sampling.seed={self.seed}: must lie in 0..2**64 - 1")


@torch.inference_mode()
def sample(
    logits_shard: Tensor,
    first_id: int,
    tp: TensorParallel,
    spec: SamplingSpec,
    request_ids: Sequence[int],
    step_numbers: Sequence[int],
) -> Tensor:
    """Next token of every row; the same on all ranks of the group.

    Parameters
    ----------
    logits_shard : tensor, shape (b, vocab_shard)
        Logits of the ids from `first_id` on; of one width on all ranks, minus infinity where the
        vocabulary has ended.
    first_id : int
        Vocabulary id of the first column.
    tp : TensorParallel
        The group that the vocabulary is split over.
    spec : SamplingSpec
        How to draw.
    request_ids, step_numbers : sequences of int, length b
        Request of each row (64 bits, of either sign), and which of its output tokens this is, from 0.

    Returns
    -------
    int64 tensor, shape (b,)
        Of equal logits greedy sampling takes the lowest id.
    """
    if spec.temperature == 0:
        return _most_probable(logits_shard, first_id, tp)
    logits = torch.cat(tp.all_gather(logits_shard.contiguous()), dim=-1).double()
    # Less the maximum first: a temperature near 0 then gives 0 and minus infinity, never a NaN.
    logits = (logits - logits.amax(-1, keepdim=True)) / spec.temperature
    probabilities = logits.softmax(-1)
    if spec.top_p < 1:
        probabilities = _nucleus(probabilities, spec.top_p)
    return _invert(probabilities, uniforms(spec.seed, request_ids, step_numbers).to(logits.device))


def uniforms(seed: int, request_ids: Sequence[int], step_numbers: Sequence[int]) -> Tensor:
    """One number in [0, 1) for each pair of request and step, float64, shape (b,).

    Notes
    -----
    Philox (Salmon et al., 2011) is counter-based: seed and request are its key, the step its
    counter, so a number is found without drawing those before it.
    """
    raw = [
        np.random.Philox(key=seed | int(request) % 2**64 << 64, counter=int(step) << 64).random_raw()
        for request, step in zip(request_ids, step_numbers, strict=True)
    ]
    return torch.tensor([(value >> 11) * 2.0**-53 for value in raw], dtype=torch.float64)


def _most_probable(logits_shard: Tensor, first_id: int, tp: TensorParallel) -> Tensor:
    """Lowest id of the greatest logit; `max` gives the first of equals within a shard."""
    values, ids = logits_shard.max(-1)
    ids = ids + first_id
    if tp.size == 1:
        return ids
    # float64 holds float32 logits and vocabulary ids exactly, so both travel in one message.
    best = torch.stack(tp.all_gather(torch.stack((values.double(), ids.double()))))
    winner = best[:, 0].argmax(0, keepdim=True)
    return best[:, 1].gather(0, winner).squeeze(0).long()


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the most probable tokens that together reach `top_p` of a row; ties at its edge stay.

    Keeping ties makes the outcome a matter of probabilities alone, not of the order in which a
    sort happens to leave equal ones.
    """
    vocab_size = probabilities.shape[-1]
    num_candidates = min(FIRST_CANDIDATES, vocab_size)
    while True:
        ranked = probabilities.topk(num_candidates, dim=-1).values
        reached = ranked.cumsum(-1) >= top_p
        if num_candidates == vocab_size or bool(reached[:, -1].all()):
            break
        num_candidates = min(8 * num_candidates, vocab_size)
    # Rounding may keep the sum of a whole row below top_p; then the last candidate is the edge.
    reached[:, -1] = True
    edge = ranked.gather(-1, reached.int().argmax(-1, keepdim=True))
    return torch.where(probabilities >= edge, probabilities, 0.0)


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """First id whose cumulated share of a row exceeds `uniform` (b,), int64."""
    cumulated = probabilities.cumsum(-1)
    total = cumulated[:, -1:]
    # Strictly below the total, whatever the product rounds to: beyond it lies no token.
    target = torch.minimum(uniform.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target, right=True).squeeze(1)
