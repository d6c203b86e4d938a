"""Numbers as people read them: three significant digits and a unit."""

from __future__ import annotations

import math

ABSENT = "-"


def format_number(value: float | None) -> str:
    """Three significant digits without an exponent; `-` if there is no finite value."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    # More than six decimals say nothing that a reader of a table can use.
    return f"{rounded:,.{min(decimals, 6)}f}"


def format_seconds(seconds: float | None) -> str:
    """A duration in s, ms or us; `-` if there is none, `none` if it is infinite (no bound)."""
    if seconds is None or math.isnan(seconds):
        return ABSENT
    if math.isinf(seconds):
        return "none"
    # The thresholds leave 999.7 ms to become 1.00 s rather than 1,000 ms.
    for limit_s, factor, unit in ((0.9995e-3, 1e6, "us"), (0.9995, 1e3, "ms")):
        if 0 < abs(seconds) < limit_s:
            return f"{format_number(seconds * factor)} {unit}"
    return f"{format_number(seconds)} s"


def format_gib(num_bytes: float | None) -> str:
    """Bytes in GiB."""
    return ABSENT if num_bytes is None else f"{format_number(num_bytes / 2**30)} GiB"


def format_percent(fraction: float | None, *, sign: bool = False) -> str:
    """A fraction in percent with one decimal, on request with its sign."""
    if fraction is None or not math.isfinite(fraction):
        return ABSENT
    return f"{100 * fraction:+.1f} %" if sign else f"{100 * fraction:.1f} %"


def format_ratio(ratio: float | None) -> str:
    """A ratio as `2.31x`."""
    return ABSENT if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f}x"


def ratio_of(numerator: float | None, denominator: float | None) -> float | None:
    """The ratio of two figures; None if either is missing or the denominator is not above 0."""
    if numerator is None or denominator is None or not denominator > 0:
        return None
    return numerator / denominator
