"""Input and output lengths of requests, as distributions that can be planned with and sampled from."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from exegpt.errors import DistributionError
from exegpt.workload.pmf import (
    FloatArray,
    IntArray,
    checked_pmf,
    empirical_pmf,
    fixed_pmf,
    percentile,
    truncated_normal_pmf,
)

__all__ = [
    "RequestLengths",
    "clip_outputs",
    "empirical_pmf",
    "fixed_pmf",
    "independent",
    "joint",
    "reject_long_inputs",
    "truncated_normal_pmf",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestLengths:
    """Lengths of the requests to plan for; built by `independent` or `joint`.

    Attributes
    ----------
    input_pmf, output_pmf : float array, shape (max + 1,)
        Probability of each number of tokens. Length 0 has none on either side: encoding always
        yields a first token, so a request without output is one that failed, not a short one.
    mean_input_by_output, mean_square_input_by_output : float array, shape (max_output + 1,)
        E[input | output] and E[input^2 | output]; 0 where no request has that output length.
    pairs : int array, shape (n, 2), or None
        Observed (input, output) lengths. None says that the two are independent.
    description : str
        Where the lengths come from.
    notes : tuple of str
        What a report should say about them.
    """

    input_pmf: FloatArray
    output_pmf: FloatArray
    mean_input_by_output: FloatArray
    mean_square_input_by_output: FloatArray
    pairs: IntArray | None = None
    description: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_pmf", checked_pmf("input lengths", self.input_pmf))
        object.__setattr__(self, "output_pmf", checked_pmf("output lengths", self.output_pmf))
        has_mass = self.output_pmf > 0
        for field, expected in (
            ("mean_input_by_output", self.mean_input),
            ("mean_square_input_by_output", self.mean_square_input),
        ):
            values = np.array(getattr(self, field), dtype=np.float64)
            if len(values) < len(has_mass) or not np.isfinite(values).all():
                raise DistributionError(f"{field}: expected {len(has_mass)} numbers, one per output length")
            values = np.where(has_mass, values[: len(has_mass)], 0.0)
            total = float(self.output_pmf @ values)
            if not math.isclose(total, expected, rel_tol=1e-6):
                raise DistributionError(
                    f"{field}: averages to {total:g}, but the input lengths to {expected:g}"
                )
            values.setflags(write=False)
            object.__setattr__(self, field, values)
        if self.pairs is not None:
            pairs = np.array(self.pairs, dtype=np.int64)
            pairs.setflags(write=False)
            object.__setattr__(self, "pairs", pairs)

    @property
    def mean_input(self) -> float:
        """Mean input length, tokens."""
        return _moment(self.input_pmf, 1)

    @property
    def mean_output(self) -> float:
        """Mean output length, tokens."""
        return _moment(self.output_pmf, 1)

    @property
    def mean_square_input(self) -> float:
        """E[input^2], square tokens; attention over prompts costs in proportion to it."""
        return _moment(self.input_pmf, 2)

    @property
    def std_input(self) -> float:
        """Standard deviation of the input length, tokens."""
        return _std(self.input_pmf)

    @property
    def std_output(self) -> float:
        """Standard deviation of the output length, tokens."""
        return _std(self.output_pmf)

    @property
    def max_input(self) -> int:
        """Largest input length, tokens."""
        return len(self.input_pmf) - 1

    @property
    def max_output(self) -> int:
        """Largest output length, tokens."""
        return len(self.output_pmf) - 1

    @property
    def correlation(self) -> float:
        """Linear correlation of input and output length; 0 if either is constant."""
        if self.std_input == 0 or self.std_output == 0:
            return 0.0
        outputs = np.arange(len(self.output_pmf))
        product = float(self.output_pmf @ (self.mean_input_by_output * outputs))
        return (product - self.mean_input * self.mean_output) / (self.std_input * self.std_output)

    def input_percentile(self, q: float) -> int:
        """Smallest input length that at least `q` per cent of the requests do not exceed, 0 < q <= 100."""
        return percentile(self.input_pmf, q)

    def output_percentile(self, q: float) -> int:
        """Smallest output length that at least `q` per cent of the requests do not exceed, 0 < q <= 100."""
        return percentile(self.output_pmf, q)

    def sample(self, rng: np.random.Generator, n: int) -> tuple[IntArray, IntArray]:
        """Draw `n` requests; observed pairs stay together.

        Returns
        -------
        inputs, outputs : int64 array, shape (n,)
            Tokens.
        """
        if self.pairs is not None:
            rows = self.pairs[rng.integers(len(self.pairs), size=n)]
            return rows[:, 0].copy(), rows[:, 1].copy()
        inputs = rng.choice(len(self.input_pmf), size=n, p=self.input_pmf)
        outputs = rng.choice(len(self.output_pmf), size=n, p=self.output_pmf)
        return inputs.astype(np.int64), outputs.astype(np.int64)

    def digest(self) -> str:
        """Twelve hexadecimal digits that change when the distribution does."""
        digest = hashlib.sha256()
        # Rounded, so that the last bits of another machine's libraries do not count.
        for values, decimals in ((self.input_pmf, 12), (self.output_pmf, 12), (self.mean_input_by_output, 6)):
            digest.update(len(values).to_bytes(8, "little"))
            digest.update(np.round(values, decimals).astype("<f8").tobytes())
        return digest.hexdigest()[:12]

    def summary(self) -> dict[str, Any]:
        """Plain numbers (tokens) for files and tables."""
        result: dict[str, Any] = {"description": self.description, "digest": self.digest()}
        for side in ("input", "output"):
            pmf = self.input_pmf if side == "input" else self.output_pmf
            result[side] = {
                "mean": _moment(pmf, 1),
                "std": _std(pmf),
                "p50": percentile(pmf, 50),
                "p90": percentile(pmf, 90),
                "p99": percentile(pmf, 99),
                "max": len(pmf) - 1,
            }
        result["correlation"] = self.correlation
        result["notes"] = list(self.notes)
        return result


def independent(
    input_pmf: FloatArray, output_pmf: FloatArray, *, description: str = "", notes: tuple[str, ...] = ()
) -> RequestLengths:
    """Lengths whose input and output are drawn independently (the paper's assumption, section 5).

    Raises
    ------
    DistributionError
        If either is no probability distribution over lengths of at least 1 token.
    """
    inputs = checked_pmf("input lengths", input_pmf)
    shape = np.shape(output_pmf)
    return RequestLengths(
        input_pmf=inputs,
        output_pmf=output_pmf,
        mean_input_by_output=np.full(shape, _moment(inputs, 1)),
        mean_square_input_by_output=np.full(shape, _moment(inputs, 2)),
        description=description,
        notes=notes,
    )


def joint(pairs: IntArray, *, description: str = "", notes: tuple[str, ...] = ()) -> RequestLengths:
    """Lengths as observed, with the correlation of input and output.

    Parameters
    ----------
    pairs : int array, shape (n, 2)
        Input and output tokens of each request, at least 1 each.

    Raises
    ------
    DistributionError
        If there are no pairs, or a length is no whole number or below 1.
    """
    pairs = np.asarray(pairs)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise DistributionError(
            f"observed lengths: expected (input, output) pairs, found an array of shape {pairs.shape}"
        )
    inputs, outputs = pairs[:, 0], pairs[:, 1]
    input_pmf, output_pmf = empirical_pmf(inputs), empirical_pmf(outputs)
    counts = np.maximum(np.bincount(outputs), 1)
    floats = inputs.astype(np.float64)
    return RequestLengths(
        input_pmf=input_pmf,
        output_pmf=output_pmf,
        mean_input_by_output=np.bincount(outputs, weights=floats) / counts,
        mean_square_input_by_output=np.bincount(outputs, weights=floats**2) / counts,
        pairs=pairs,
        description=description,
        notes=notes,
    )


def clip_outputs(lengths: RequestLengths, maximum: int) -> RequestLengths:
    """Lengths when generation stops at `maximum` output tokens: the mass above moves to it.

    Raises
    ------
    DistributionError
        If `maximum` is below 1.
    """
    if maximum < 1:
        raise DistributionError(f"output limit {maximum}: must be at least 1 token")
    if maximum >= lengths.max_output:
        return lengths
    pmf = lengths.output_pmf
    share = float(pmf[maximum + 1 :].sum())
    notes = (*lengths.notes, f"{share:.3%} of the outputs stop at the limit of {maximum} tokens")
    if lengths.pairs is not None:
        pairs = np.column_stack([lengths.pairs[:, 0], np.minimum(lengths.pairs[:, 1], maximum)])
        return joint(pairs, description=lengths.description, notes=notes)
    clipped = pmf[: maximum + 1].copy()
    clipped[maximum] += share
    return independent(lengths.input_pmf, clipped, description=lengths.description, notes=notes)


def reject_long_inputs(lengths: RequestLengths, maximum: int) -> RequestLengths:
    """Lengths of the requests whose input has at most `maximum` tokens; longer ones are refused.

    Raises
    ------
    DistributionError
        If no request is that short.
    """
    if maximum >= lengths.max_input:
        return lengths
    share = 1 - float(lengths.input_pmf[: max(maximum + 1, 0)].sum())
    if maximum < 1 or share >= 1 - 1e-12:
        shortest = int(np.flatnonzero(lengths.input_pmf)[0])
        source = lengths.description or "the workload"
        raise DistributionError(
            f"no input fits into {maximum} tokens; the shortest of {source} has {shortest}. "
            "Choose a model with a longer window, or shorter inputs."
        )
    notes = (*lengths.notes, f"{share:.3%} of the inputs are longer than {maximum} tokens and are refused")
    if lengths.pairs is not None:
        kept = lengths.pairs[lengths.pairs[:, 0] <= maximum]
        return joint(kept, description=lengths.description, notes=notes)
    kept_pmf = lengths.input_pmf[: maximum + 1]
    kept_pmf = kept_pmf / kept_pmf.sum()
    return independent(kept_pmf, lengths.output_pmf, description=lengths.description, notes=notes)


def _moment(pmf: FloatArray, order: int) -> float:
    return float(pmf @ np.arange(len(pmf), dtype=np.float64) ** order)


def _std(pmf: FloatArray) -> float:
    deviation = np.arange(len(pmf)) - _moment(pmf, 1)
    return math.sqrt(float(pmf @ deviation**2))
