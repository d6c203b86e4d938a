import io
import math

import pytest
from rich.console import Console

from exegpt.report import rows
from exegpt.report import solution_rows as solution
from exegpt.report.gather import GatherResult
from exegpt.report.summary import relative_errors, summarise_run
from exegpt.report.tables import (
    WIDTH,
    gather_table,
    profile_table,
    run_table,
    simulate_table,
    solution_table,
)


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=WIDTH)


def text_of(console):
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= WIDTH
    return text


def squeezed(console):
    """The printed text without line breaks and columns' blanks."""
    return " ".join(text_of(console).split())


def test_solution_shows_the_schedule_and_its_rivals(solve_record, console):
    solution_table(solve_record, console)
    text = squeezed(console)
    assert "Chosen schedule" in text
    assert "B_E 32, B_D 152, N_D 16, m 2, 2 x TP 2" in text
    assert "2 stages, encode and decode: ranks 0-3 layers 0-29 (2 groups of 2, 15 each)" in text
    assert "12.3 seq/s, 1,580 output tok/s" in text
    assert "4.20 s of 5.00 s (84.0 %)" in text
    assert "31.0 GiB of 48.0 GiB (64.6 %); per GPU 31.0, 31.0, 29.0, 29.0 GiB" in text
    assert "123,456 of 2,000,000 candidates in 420 ms" in text
    assert "encode_batch_size=32 is the largest searched" in text
    assert "inputs are parent parameters" in text


def test_rivals_carry_ratio_or_reason(solve_record):
    by_name = {row[0]: row for row in solution.policy_rows(solve_record)}
    assert by_name["RRA"][5] == "1.00x"
    assert by_name["WAA_C"][-1] == "none: both sides need 52 GiB [per GPU]"
    assert set(by_name["WAA_C"][1:-1]) == {"-"}
    (static,) = solution.baseline_rows(solve_record)
    # 12.34 / 5.1
    assert (static[0], static[5], static[-1]) == ("STATIC", "2.42x", "batch 16, m 1, 2 x TP 2")
    assert "below the line, baselines" in solution.policy_title(solve_record)


def test_the_best_comes_first_and_what_has_no_schedule_last(solve_record):
    rra = solve_record["policies"]["RRA"]
    solve_record["policies"] = {
        "WAA_C": {"infeasible": "too large"},
        "RRA": rra,
        "WAA": {**rra, "throughput_per_s": 13.0},
    }
    assert [row[0] for row in solution.policy_rows(solve_record)] == ["WAA", "RRA", "WAA_C"]


def test_costs_are_shown_where_there_is_a_price(solve_record, console):
    assert "cost/Mtok" not in solution.policy_columns(solve_record)
    costs = {"cost_per_million_output_tokens": 4.2, "cost_per_million_tokens": 1.05}
    solve_record |= {**costs, "cost_per_hour": 24.0}
    solve_record["policies"]["RRA"] = {**solve_record["policies"]["RRA"], **costs}
    by_name = {row[0]: row for row in solution.policy_rows(solve_record)}
    place = solution.policy_columns(solve_record).index("cost/Mtok")
    assert (by_name["RRA"][place], by_name["WAA_C"][place]) == ("4.20", "-")
    assert len({len(row) for row in by_name.values()}) == 1
    solution_table(solve_record, console)
    text = squeezed(console)
    assert (
        "4.20 per million output tokens (1.05 with input tokens counted), 24.0 per hour for all GPUs" in text
    )


def test_brackets_are_text_and_no_markup(solve_record, console):
    solve_record["notes"] = ["sweep [bold]x[/bold] of [1,2]"]
    solution_table(solve_record, console)
    assert "[bold]x[/bold] of [1,2]" in squeezed(console)


def test_infeasible_answer_says_what_to_relax(infeasible_record, console):
    solution_table(infeasible_record, console)
    text = squeezed(console)
    assert "No schedule meets all constraints" in text
    assert "bound on latency 500 ms" in text
    assert "relax bound.latency_s from 0.5 s to 1.25 s" in text
    assert "x" not in {row[5] for row in solution.policy_rows(infeasible_record)}


def test_closest_schedule_is_marked_as_above_the_bound(solve_record, console):
    solve_record |= {"status": "infeasible", "latency_s": 7.5}
    solution_table(solve_record, console)
    text = squeezed(console)
    assert "the closest" in text
    assert "7.50 s of 5.00 s (150.0 %, above the bound)" in text
    # Nothing was chosen that the others could be compared with.
    assert {row[5] for row in solution.policy_rows(solve_record)} == {"-"}


def test_no_bound_is_said(solve_record):
    for bound_s in (None, math.inf):
        facts = dict(solution.solution_rows({**solve_record, "latency_bound_s": bound_s}))
        assert facts["latency"] == "4.20 s (no bound)"


def test_many_gpus_are_not_listed_one_by_one(solve_record):
    solve_record["memory_bytes"] = [(30 + 0.1 * i) * 2**30 for i in range(48)]
    assert dict(solution.solution_rows(solve_record))["memory per GPU"].endswith("per GPU from 30.0 GiB")


def test_run_sets_prediction_beside_measurement(served, console):
    records, events = served
    run = summarise_run(records, events, bound_length_ids=[1, 2])
    predicted = {**run, "throughput_per_s": run["throughput_per_s"] * 1.02}
    run |= {"predicted": predicted, "error": relative_errors(predicted, run)}
    run_table(run, console)
    text = squeezed(console)
    throughput = next(row for row in rows.run_rows(run) if row[0] == "throughput, seq/s")
    assert throughput[3] == "+2.0 %"
    assert "80 of 80 completed" in text
    assert "latency of 2 probes" in text


def test_run_without_prediction_or_requests(console):
    run_table(summarise_run([], []), console)
    text = squeezed(console)
    assert "0 of 0 completed" in text
    assert "too few cycles" in text


def test_failed_requests_are_counted():
    facts = dict(rows.run_facts({"num_requests": 5, "num_completed": 3, "num_failed": 2}))
    assert facts["requests"] == "3 of 5 completed, 2 failed"


def test_simulation_compares_closed_form_and_replay(solve_record, served, console):
    records, events = served
    replay = summarise_run(records, events, bound_length_ids=[0])
    replay["throughput_per_s"] = 10.0
    simulate = {"steady": solve_record, "replay": replay}
    simulate_table(simulate, console)
    # 12.34 against 10
    assert rows.simulate_rows(simulate)[0] == ("throughput, seq/s", "12.3", "10.0", "+23.4 %")
    assert rows.simulate_title(simulate) == "Simulated"
    several = {"replay": {**replay, "num_replicas": 3}}
    assert "3 replicas: requests are dealt to them in turn" in rows.simulate_title(several)
    assert "latency at the bound's length" in text_of(console)


def test_profile(console):
    profile = {
        "path": "a/[b].json",
        "points": 1244,
        "wall_s": 12.3,
        "tp_sizes": [1, 2],
        "device": None,
        "notes": ["made isotone at 3 points"],
        "limits": {
            "tp1.linear": {"tokens": 4096.0, "batch": 64},
            "tp2.linear": {"tokens": 4096.0, "batch": 64},
            "send": {"bytes": 1e6},
        },
        "provenance": {"tp1.linear": "measured", "tp2.linear": "measured"},
    }
    profile_table(profile, console)
    text = squeezed(console)
    for part in (
        "path a/[b].json",
        "points 1,244",
        "wall 12.3 s",
        "tp sizes 1, 2",
        "device -",
        "note made isotone at 3 points",
        "linear 1, 2 tokens 4,096, batch 64 measured",
        "send - bytes 1,000,000 -",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("steady", "part"),
    [
        ({"throughput_per_s": 2.0, "latency_s": 1.5}, "2.00 seq/s"),
        ({"infeasible": "outside the profile"}, "none, outside the profile"),
    ],
)
def test_steady_state_beside_a_run(steady, part):
    assert part in rows.steady_text(steady)


def test_gathered_sweep(tmp_path, console):
    row = {
        "job": "3",
        "workload": "translation",
        "status": "ok",
        "policy": "RRA",
        "throughput_per_s": 12.34,
        "latency_s": 4.2,
        "latency_bound_s": 5.0,
        "encode_batch_size": 32,
        "decode_iterations": 16,
        "ratio_to_static": 2.42,
    }
    failed = {**dict.fromkeys(row), "job": "4", "workload": "[1,2]", "status": "failed"}
    result = GatherResult(
        directory=tmp_path,
        rows=(row, failed),
        columns=tuple(row),
        varying=("workload",),
        warnings=("4/result.json: corrupt",),
        csv_path=tmp_path / "summary.csv",
        markdown_path=tmp_path / "summary.md",
        plot_path=tmp_path / "pareto.png",
    )
    gather_table(result, console)
    text = " ".join(console.file.getvalue().split())
    assert "3 translation ok RRA 12.3 4.20 s 5.00 s 32 16 2.42x" in text
    assert "4 [1,2] failed -" in text
    assert "warning: 4/result.json: corrupt" in text
    assert str(tmp_path / "pareto.png") in text
