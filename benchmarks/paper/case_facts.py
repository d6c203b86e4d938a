"""Tables 6 and 7 of the paper, and the closed form that its rows of RRA are of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from exegpt.specs import Policy

BOUND_LENGTH = 63  # 99th percentile of task S (table 3)

# Mean and half range, s, by phase.
Times = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of Table 6; TP is 2 beside 2 for WAA."""

    bound_s: float
    policy: Policy
    batch: int
    extent: int
    tp_size: int
    latency_s: float
    throughput_per_s: float


_WAA, _RRA = partial(Row, policy=Policy.WAA_C, tp_size=2), partial(Row, policy=Policy.RRA, tp_size=4)
TABLE_6 = (
    _WAA(bound_s=3.1, batch=4, extent=1, latency_s=3.01, throughput_per_s=22.41),
    _WAA(bound_s=5.9, batch=10, extent=1, latency_s=4.11, throughput_per_s=23.76),
    _RRA(bound_s=11.5, batch=52, extent=13, latency_s=10.23, throughput_per_s=25.23),
    _RRA(bound_s=math.inf, batch=49, extent=7, latency_s=16.87, throughput_per_s=26.15),
)
# Table 7: mean and half range that holds 99 % of the times, s.
TABLE_7 = {
    ("RRA", "encode"): (1.68, 0.12),
    ("RRA", "decode"): (0.038, 0.001),
    ("WAA", "encode"): (0.85, 0.10),
    ("WAA", "decode"): (0.041, 0.002),
}


def identity_s(row: Row, length: int, decode_s: float) -> float:
    """Latency of RRA's printed closed form, s: full cycles, the encoding, then iterations up to `length`."""
    cycle_s = row.batch / row.throughput_per_s
    encode_s = cycle_s - row.extent * decode_s
    cycles, left = divmod(length - 1, row.extent)
    return cycles * cycle_s + encode_s + (1 + left) * decode_s


def printed_identity_s(row: Row) -> float:
    """`identity_s` of a row with Table 7's decode time."""
    return identity_s(row, BOUND_LENGTH, TABLE_7["RRA", "decode"][0])


def flat(times: Mapping[str, Times]) -> dict[tuple[str, str], tuple[float, float]]:
    """Times by policy and phase."""
    return {(policy, phase): value for policy, by in times.items() for phase, value in by.items()}
