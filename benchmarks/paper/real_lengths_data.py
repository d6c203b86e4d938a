"""Lengths of real requests for figure 10: which traces, and which part of them is planned with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exegpt.errors import TraceError
from exegpt.workload.lengths import RequestLengths, joint
from exegpt.workload.pmf import IntArray
from exegpt.workload.traces import read_pairs

DATA = Path(os.environ.get("EXEGPT_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
SHARE_PLANNED = 0.10
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A file of pairs, and the data set of the paper that it stands for.

    Pairs above either limit are dropped: the static baseline keeps a slot of the longest input and the
    longest output for every query, which is to lie within the models' window of 2048 tokens.
    """

    name: str
    file: str
    stands_for: str
    max_input: int = 1536
    max_output: int = 512


TRACES = (
    Trace(name="WMT en-de", file="wmt21_newstest_en-de_lengths.csv.gz", stands_for="WMT"),
    Trace(name="WMT de-en", file="wmt21_newstest_de-en_lengths.csv.gz", stands_for="WMT"),
    Trace(name="Alpaca", file="alpaca_eval_alpaca-7b_lengths.csv.gz", stands_for="Alpaca"),
    Trace(
        name="arXiv",
        file="arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz",
        stands_for="CNN/DailyMail",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A trace's pairs within its limits: a part to plan with, the rest to serve."""

    trace: Trace
    planned: RequestLengths
    served: RequestLengths
    num_pairs: int
    num_dropped: int


def read_split(trace: Trace, directory: Path = DATA / "traces") -> Split:
    """Read a trace and split it.

    Raises
    ------
    TraceError
        If the file is not there or holds no pairs.
    """
    read = read_pairs(directory / trace.file)
    if read.pairs is None:
        raise TraceError(f"{directory / trace.file}: holds distributions; pairs of lengths are needed")
    return split(trace, read.pairs)


def split(trace: Trace, pairs: IntArray) -> Split:
    """Drop pairs beyond the limits, and part the others at random, always in the same way."""
    kept = pairs[(pairs[:, 0] <= trace.max_input) & (pairs[:, 1] <= trace.max_output)]
    kept = kept[np.random.default_rng(SEED).permutation(len(kept))]
    count = max(round(SHARE_PLANNED * len(kept)), 1)
    return Split(
        trace=trace,
        planned=joint(kept[:count], description=f"{trace.name}, a tenth"),
        served=joint(kept[count:], description=f"{trace.name}, the rest"),
        num_pairs=len(pairs),
        num_dropped=len(pairs) - len(kept),
    )
