"""Figures 6 and 8: throughput over the static baseline in every scenario."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from rich.console import Console
from rich.progress import track

from exegpt.report.schedule_text import knobs_text
from exegpt.report.units import format_number, format_ratio, format_seconds
from exegpt.scheduler.solution import candidate_record
from exegpt.scheduler.solve import solve
from exegpt.specs import BoundSpec
from paper.outcomes import Outcome, by_task, mean_gain
from paper.plots import gain_plot
from paper.report import Claim, Place, Section, table
from paper.scenarios import FIGURE_6, FIGURE_8, OURS, PUBLISHED, RRA, WAA, Policy, Scenario, problem

# Static batches, whose latency is taken for the bound, at which the paper's greatest gain is looked for.
SMALL_BATCHES = (4, 8, 12, 16, 32)
GREATEST = ("gpt3-175b-a100", "gpt3-175b-a40")


def figure_6(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Scenarios of the small and middle models."""
    return [o for o in outcomes if (o.scenario.experiment, o.scenario.task) in FIGURE_6]


def figure_8(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Scenarios of the large models."""
    return [o for o in outcomes if (o.scenario.experiment, o.scenario.task) in FIGURE_8]


def rra_gain(outcome: Outcome) -> float:
    """RRA's throughput over STATIC's, as figure 8 shows it; 0 where RRA has no schedule."""
    return outcome.over_static(RRA) or 0.0


def section(outcomes: Sequence[Outcome], place: Place, console: Console) -> Section:
    """Tables and plots of all scenarios."""
    small, large = figure_6(outcomes), figure_8(outcomes)
    gain_plot(small, place.directory / "figure-6.png", "Figure 6: gain over STATIC")
    gain_plot(large, place.directory / "figure-8.png", "Figure 8: gain over STATIC")
    at_batches = gains_at_batches(console)
    parts = [
        "A gain is the throughput of the better of RRA and WAA (WAA_C and WAA_M) over that of STATIC, the "
        "paper's FasterTransformer, each at its own best configuration under the same bound. Bounds are the "
        "10, 30 and 70 % quantiles of STATIC's latencies over its batch sizes, and none.",
        place.link("figure-6.png", "gains of figure 6"),
        place.link("figure-8.png", "gains of figure 8"),
        "### Winning policy per task\n\n" + winners_table(outcomes),
        "### The greatest gain\n\n" + greatest_text(at_batches),
        "### All scenarios\n\nThroughput in sequences/s; `-` where no schedule meets the bound (the paper's "
        "NS).\n\n" + scenarios_table(outcomes),
    ]
    return Section(
        title="Figures 6 and 8: throughput over the static baseline",
        claims=claims(outcomes, at_batches),
        body="\n\n".join(parts),
    )


def claims(outcomes: Sequence[Outcome], at_batches: Sequence[Sequence[object]]) -> list[Claim]:
    """The paper's statements on these figures."""
    small, large = figure_6(outcomes), figure_8(outcomes)
    best_small, best = max(small, key=_gain), max(outcomes, key=_gain)
    overall, free = mean_gain(outcomes), mean_gain(outcomes, OURS)
    rra = [rra_gain(o) for o in large]
    unbounded = fmean(rra_gain(o) for o in large if o.scenario.bound == "none")
    best_rra = max(large, key=rra_gain)
    papers_best = _named(small, "gpt3-39b", "S", "medium")
    enough = [int(str(r[1])) for r in at_batches if (_f(r[4]) or 0.0) >= 15.2]
    return [
        Claim(
            where="section 7, both figures",
            paper="2.9x on average",
            ours=f"{overall:.2f}x over {len(outcomes)} scenarios; {free:.2f}x when WAA's split is free",
            agrees=overall >= 2.9,
            why="the paper's average contains its 15.2x; see the greatest gain.",
        ),
        Claim(
            where="figure 6",
            paper="2x on average; greatest 5.4x (39B, S, second bound, WAA)",
            ours=f"{mean_gain(small):.2f}x; greatest {_gain(best_small):.2f}x ({best_small.scenario}, "
            f"{best_small.winner}), {_gain(papers_best):.2f}x at the paper's place",
            agrees=mean_gain(small) >= 2.0 and _gain(best_small) >= 5.4,
            why="model, policy and bound of the greatest gain are the paper's, its task and size are not.",
        ),
        Claim(
            where="figure 8",
            paper="RRA: 3.2x on average, from 1.1x to 15.2x; 2.2x without a bound",
            ours=f"{fmean(rra):.2f}x, from {min(rra):.2f}x to {max(rra):.2f}x; "
            f"{unbounded:.2f}x without a bound",
            agrees=fmean(rra) >= 3.2 and max(rra) >= 15.2,
            why="above the paper without a bound, below it at tight ones: these depend on the smallest "
            "static batch (below).",
        ),
        Claim(
            where="figure 8",
            paper="greatest gain 15.2x: 175B, G, tightest bound",
            ours=f"RRA: {rra_gain(best_rra):.2f}x ({best_rra.scenario}); any: {_gain(best):.2f}x "
            f"({best.scenario}, {best.winner})",
            agrees=rra_gain(best_rra) >= 15.2 and best_rra.scenario.experiment in GREATEST,
            why="the task and the bound are the paper's. 15.2x is exceeded where the bound leaves STATIC a "
            f"batch of {max(enough, default=0)} at 175B (below); the 10 % quantile of the batches that fit "
            "here leaves it more.",
        ),
        *policy_claims(outcomes),
    ]


def _named(outcomes: Sequence[Outcome], *names: str) -> Outcome:
    return next(o for o in outcomes if (o.scenario.experiment, o.scenario.task, o.scenario.bound) == names)


def policy_claims(outcomes: Sequence[Outcome]) -> list[Claim]:
    """Which policy wins which task."""
    small = by_task(figure_6(outcomes))
    wins = {task: Counter(o.winner for o in group) for task, group in small.items()}
    decoders = [o for t in ("S", "C1") for o in small[t] if not o.scenario.experiment.startswith("t5")]
    at = {
        size: [o for o in outcomes if o.scenario.experiment.startswith(size)]
        for size in ("gpt3-175b", "gpt3-341b")
    }
    feasible = {size: [o for o in group if o.throughput_per_s(WAA) is not None] for size, group in at.items()}
    return [
        Claim(
            where="figure 6",
            paper="WAA wins S and C1, RRA generally wins T",
            ours="; ".join(f"{task}: {_counts(group)}" for task, group in small.items())
            + f"; S and C1 without T5: {_counts(decoders)}",
            agrees=wins["T"]["RRA"] > wins["T"]["WAA"]
            and all(wins[t]["WAA"] > wins[t]["RRA"] for t in ("S", "C1")),
            why="at tight bounds WAA's pool makes answers late here, and without a bound RRA encodes in "
            "large batches; on T5 with eight GPUs the two are within a few per cent of each other. WAA wins "
            "where it does in the paper: 13B and 39B on S and C1 between the bounds.",
        ),
        Claim(
            where="figure 8",
            paper="WAA does not run at 175B and 341B",
            ours="; ".join(
                f"{size}: {len(feasible[size])} of {len(group)} scenarios" for size, group in at.items()
            ),
            agrees=not any(feasible.values()),
            why="two copies of the weights do fit beside K/V in pages; see the memory split.",
        ),
    ]


def _counts(outcomes: Iterable[Outcome]) -> str:
    return ", ".join(f"{winner} {n}" for winner, n in Counter(o.winner for o in outcomes).most_common())


def winners_table(outcomes: Sequence[Outcome]) -> str:
    """Wins and mean gains per task and figure."""
    rows = []
    for name, part in (("6", figure_6(outcomes)), ("8", figure_8(outcomes))):
        for task, group in by_task(part).items():
            count = Counter(o.winner for o in group)
            gains = [f"{mean_gain(group, policies):.2f}x" for policies in (PUBLISHED, OURS)]
            rows.append([name, task, count["RRA"], count["WAA"], *gains])
    header = ["figure", "task", "RRA wins", "WAA wins", "mean gain", "with a free split"]
    return table(header, rows, right=(2, 3, 4, 5))


def gains_at_batches(console: Console) -> list[list[object]]:
    """175B on G under STATIC's latency at a small batch: cluster, batch, bound, STATIC's throughput, gain."""
    rows: list[list[object]] = []
    for experiment in track(GREATEST, description="greatest gain", console=console, transient=True):
        base = problem(Scenario(experiment=experiment, task="G", bound="none"), PUBLISHED)
        for batch in SMALL_BATCHES:
            # The static space ends at this batch, and without a bound its best is its greatest.
            widest = solve(
                replace(base, policies=(Policy.STATIC,), baselines=(), max_encode_batch_size=batch)
            )
            static = widest.best
            if static is None:
                continue
            found = solve(replace(base, bound=BoundSpec(latency_s=static.latency_s), baselines=())).best
            gain = found.throughput_per_s / static.throughput_per_s if found else None
            rows.append([experiment, static.batch, static.latency_s, static.throughput_per_s, gain])
    return rows


def greatest_text(rows: Sequence[Sequence[object]]) -> str:
    """The gain at 175B on G by the static batch that the bound allows."""
    shown = [
        [r[0], r[1], format_seconds(_f(r[2])), format_number(_f(r[3])), format_ratio(_f(r[4]))] for r in rows
    ]
    return (
        "The tighter the bound, the fewer queries a static batch may hold, while ours only encode less "
        "often. With the bound at STATIC's own latency for a small batch, 175B on G:\n\n"
        + table(["experiment", "static batch", "bound", "STATIC seq/s", "gain"], shown, right=(1, 2, 3, 4))
    )


def _f(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def scenarios_table(outcomes: Sequence[Outcome]) -> str:
    """A row per scenario."""
    rows = []
    for o in outcomes:
        best = o.solution.best
        static = o.throughput_per_s([Policy.STATIC])
        knobs = "-"
        if best is not None:
            record = candidate_record(best, o.solution.problem.lengths.mean_output)
            knobs = f"{record['policy']}: {knobs_text(record)}"
        rows.append(
            [
                o.scenario.experiment,
                o.scenario.task,
                format_seconds(o.solution.bound.latency_s),
                format_number(static),
                format_number(o.throughput_per_s(RRA)),
                format_number(o.throughput_per_s(WAA)),
                format_number(o.throughput_per_s([Policy.WAA])),
                format_ratio(o.gain),
                knobs,
            ]
        )
    header = ["experiment", "task", "bound", "STATIC", "RRA", "WAA", "free split", "gain", "chosen schedule"]
    return table(header, rows, right=(2, 3, 4, 5, 6, 7))


def _gain(outcome: Outcome) -> float:
    return outcome.gain or 0.0
