import csv
import json
import struct

import pytest

from exegpt.errors import ConfigError
from exegpt.report.gather import gather
from exegpt.report.pareto import frontier, series_of


def write_job(directory, number, overrides, *, status="ok", throughput=10.0, latency=2.0, **more):
    job = directory / str(number)
    job.mkdir(parents=True)
    solve = {
        "status": status,
        "policy": "RRA",
        "throughput_per_s": throughput,
        "throughput_tokens_per_s": 100 * throughput,
        "latency_s": latency,
        "latency_bound_s": 5.0,
        "knobs": {"encode_batch_size": 8, "decode_iterations": 4, "num_micro_batches": 2, "tp_size": 1},
        "baselines": {"STATIC": {"throughput_per_s": 4.0}},
    }
    if status == "infeasible":
        solve = {"status": status, "latency_bound_s": 5.0, "reason": "relax bound.latency_s to 9 s"}
    result = {"version": 1, "status": status, "command": "solve", "overrides": overrides, "solve": solve}
    (job / "result.json").write_text(json.dumps({**result, **more}))
    return job


@pytest.fixture
def sweep(tmp_path):
    directory = tmp_path / "sweep"
    for number in range(11):
        workload = ("translation", "codegen")[number % 2]
        overrides = ["command=solve", f"workload={workload}", f"bound.latency_s={number + 1}"]
        write_job(directory, number, overrides, throughput=10.0 + number, latency=1.0 + number)
    return directory


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_costs_are_a_column_where_a_job_has_them(sweep):
    assert "cost_per_million_output_tokens" not in gather(sweep).columns
    path = sweep / "3" / "result.json"
    result = json.loads(path.read_text())
    result["solve"]["cost_per_million_output_tokens"] = 4.2
    path.write_text(json.dumps(result))
    gather(sweep)
    costs = [row["cost_per_million_output_tokens"] for row in read_csv(sweep / "summary.csv")]
    assert costs[2:5] == ["", "4.2", ""]


def test_jobs_in_the_order_of_their_numbers(sweep):
    result = gather(sweep)
    assert [row["job"] for row in result.rows] == [str(number) for number in range(11)]
    assert result.varying == ("workload", "bound.latency_s")
    assert result.warnings == ()
    rows = read_csv(sweep / "summary.csv")
    assert [row["workload"] for row in rows[:3]] == ["translation", "codegen", "translation"]
    assert [float(row["throughput_per_s"]) for row in rows] == [10.0 + number for number in range(11)]
    # 10 / 4
    assert float(rows[0]["ratio_to_static"]) == 2.5
    assert (rows[0]["encode_batch_size"], rows[0]["decode_iterations"]) == ("8", "4")
    assert "run_throughput_per_s" not in rows[0]


def test_markdown_has_a_line_per_job(sweep):
    lines = gather(sweep).markdown_path.read_text().splitlines()
    assert len(lines) == 2 + 11
    assert lines[0].startswith("| job | workload | bound.latency_s | status | policy |")
    assert len({line.count("|") for line in lines}) == 1
    assert "| 2.50x |" in lines[2]


def test_plot_is_a_png(sweep):
    image = gather(sweep).plot_path.read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", image[16:24])
    assert (width, height) == (1200, 750)


def test_gathering_again_gives_the_same_table(sweep):
    first = gather(sweep).csv_path.read_text()
    assert gather(sweep).csv_path.read_text() == first


def test_infeasible_failed_and_dead_jobs_have_their_line(tmp_path):
    write_job(tmp_path, 0, ["bound.latency_s=1"], status="infeasible")
    (write_job(tmp_path, 1, ["bound.latency_s=2"]) / "result.json").write_text(
        json.dumps({"status": "failed", "overrides": ["bound.latency_s=2"], "error": "LaunchError: rank 1"})
    )
    noted = tmp_path / "2" / ".hydra"
    noted.mkdir(parents=True)
    (noted / "overrides.yaml").write_text("- bound.latency_s=3\n")
    write_job(tmp_path, 3, ["bound.latency_s=4"])
    result = gather(tmp_path)
    assert [row["status"] for row in result.rows] == ["infeasible", "failed", "failed", "ok"]
    assert [row["bound.latency_s"] for row in result.rows] == ["1", "2", "3", "4"]
    assert result.rows[0]["note"] == "relax bound.latency_s to 9 s"
    assert result.rows[0]["throughput_per_s"] is None
    assert "LaunchError: rank 1" in result.rows[1]["note"]
    assert len(result.warnings) == 1
    assert "missing" in result.warnings[0]


def test_corrupt_result_is_warned_of_and_the_others_are_merged(sweep):
    (sweep / "4" / "result.json").write_text('{"status": "ok"')
    (sweep / "5" / "result.json").write_text("[]")
    result = gather(sweep)
    assert [row["status"] for row in result.rows].count("ok") == 9
    assert result.rows[4]["status"] == result.rows[5]["status"] == "failed"
    assert "4/result.json: not readable as JSON" in result.warnings[0]
    assert "warning: " in result.markdown_path.read_text()


def test_measured_figures_where_jobs_ran(tmp_path):
    run = {
        "throughput_per_s": 9.5,
        "latency_s": {"p99": 2.2},
        "error": {"throughput_per_s": 0.05, "latency_s": {"p99": -0.09}},
    }
    write_job(tmp_path, 0, [], run=run)
    result = gather(tmp_path)
    row = read_csv(result.csv_path)[0]
    assert float(row["run_throughput_per_s"]) == 9.5
    assert float(row["error_latency_p99"]) == -0.09
    assert "| +5.0 % | -9.0 % |" in result.markdown_path.read_text()


def test_overrides_with_equals_signs_commas_and_pipes(tmp_path):
    write_job(tmp_path, 0, ["+model.path=a=b|c", "solver.tp_sizes=[1,2]"])
    write_job(tmp_path, 1, ["solver.tp_sizes=[4,8]"])
    result = gather(tmp_path)
    assert result.varying == ("model.path", "solver.tp_sizes")
    assert result.rows[0]["model.path"] == "a=b|c"
    assert result.rows[1]["model.path"] == ""
    assert read_csv(result.csv_path)[0]["solver.tp_sizes"] == "[1,2]"
    assert "a=b\\|c" in result.markdown_path.read_text()


def test_no_schedule_anywhere_still_gives_the_files(tmp_path):
    write_job(tmp_path, 0, [], status="infeasible")
    result = gather(tmp_path)
    assert result.plot_path.stat().st_size > 0
    assert read_csv(result.csv_path)[0]["throughput_per_s"] == ""


def test_missing_directory(tmp_path):
    with pytest.raises(ConfigError, match=r"gather\.dir=.*absent: no such directory"):
        gather(tmp_path / "absent")


def test_directory_without_results(tmp_path):
    with pytest.raises(ConfigError, match=r"gather\.dir=.*no result\.json"):
        gather(tmp_path)


def test_only_corrupt_results(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "result.json").write_bytes(b"\xff\x00")
    with pytest.raises(ConfigError, match=r"gather\.dir=.*no readable result\.json.*0/result\.json"):
        gather(tmp_path)


def test_frontier_keeps_what_no_other_beats():
    points = [(3.0, 5.0), (1.0, 1.0), (2.0, 4.0), (2.0, 3.0), (4.0, 4.5), (5.0, 6.0)]
    assert frontier(points) == [(1.0, 1.0), (2.0, 4.0), (3.0, 5.0), (5.0, 6.0)]
    beaten = set(points) - set(frontier(points))
    assert all(any(a <= x and b >= y for a, b in frontier(points)) for x, y in beaten)


def test_the_bound_makes_no_series_of_its_own(sweep):
    result = gather(sweep)
    series = series_of(result.rows, result.varying)
    assert {name: len(points) for name, points in series.items()} == {
        "workload translation": 6,
        "workload codegen": 5,
    }
