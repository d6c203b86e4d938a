"""Rotary position factors: default, linear and llama3 scaling of Hugging Face configs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exegpt.errors import ConfigError
from exegpt.runner.models.layers import Rotation
from exegpt.specs import ModelSpec, RopeScaling

ROPE_TYPES = ("default", "linear", "llama3")


def inverse_frequencies(model: ModelSpec) -> Tensor:
    """Angle per position of each pair of a head's elements.

    Returns
    -------
    float32 tensor, shape (head_dim / 2,), on the CPU

    Raises
    ------
    ConfigError
        If the scaling's type is not known, or head_dim is odd.

    Notes
    -----
    Su et al., RoFormer (2021), equation 15; llama3 scaling as released with Llama 3.1: long
    wavelengths are stretched by `factor`, short ones kept, those between interpolated.
    """
    if model.head_dim % 2:
        raise ConfigError(
            f"model.head_dim={model.head_dim} of {model.name} must be even for rotary positions"
        )
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.int64).float() / model.head_dim
    frequencies = 1.0 / model.rope_theta**exponents
    scaling = model.rope_scaling or RopeScaling(rope_type="default")
    match scaling.rope_type:
        case "default":
            return frequencies
        case "linear":
            return frequencies / scaling.factor
        case "llama3":
            return _llama3(frequencies, scaling)
        case other:
            raise ConfigError(
                f"model.rope_scaling.rope_type={other!r} of {model.name} is not supported; "
                f"allowed: {list(ROPE_TYPES)}"
            )


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
    """Rotary factors of tokens at `positions` (n,), computed in float32 and given in `dtype`."""
    angles = torch.outer(positions.float(), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return Rotation(
        cos=torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1),
        sin=torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1),
    )


def rotate_(heads: Tensor, factors: Rotation) -> None:
    """Rotate `heads` (n, num_heads, head_dim) in place."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(factors.cos).addcmul_(swapped, factors.sin)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    # 0 where a wavelength is longer than the original window / low, 1 where shorter than window / high.
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)
