import io
import struct

import pytest
from rich.console import Console

from exegpt.report import frontier_rows as frontier
from exegpt.report.html import write_report
from exegpt.report.pareto import write_frontier
from exegpt.report.tables import WIDTH, frontier_table


def point(latency_s, rate, bound_s, policy="RRA", **more):
    return {
        "latency_bound_s": bound_s,
        "least_bound_s": latency_s,
        "policy": policy,
        "num_replicas": 1,
        "knobs": {"encode_batch_size": 8, "decode_iterations": 4, "num_micro_batches": 2, "tp_size": 1},
        "throughput_per_s": rate,
        "throughput_tokens_per_s": 100 * rate,
        "latency_s": latency_s,
        **more,
    }


@pytest.fixture
def frontier_record(solve_record):
    points = [point(1.5, 3.0, 2.0), point(4.0, 6.0, 4.0), point(9.0, 8.0, None, policy="WAA")]
    search = {
        "gap": 0.5,
        "num_bounds": 5,
        "num_evaluations": 99,
        "wall_s": 1.0,
        "policies": {"RRA": points[:2], "WAA": points[2:], "WAA_M": []},
    }
    return {**solve_record, "frontier": points, "frontier_search": search}


def test_a_line_per_point(frontier_record):
    rows = frontier.frontier_rows(frontier_record)
    assert [row[:3] for row in rows] == [
        ("2.00 s", "1.50 s", "3.00"),
        ("4.00 s", "4.00 s", "6.00"),
        ("none", "9.00 s", "8.00"),
    ]
    assert [row[4] for row in rows] == ["RRA", "RRA", "WAA"]
    assert "loses at most 50.0 %" in frontier.frontier_title(frontier_record)
    assert "under each of 5 latency bounds" in frontier.frontier_title(frontier_record)


def test_cost_is_a_column_where_there_is_a_price(frontier_record):
    assert "cost/Mtok" not in frontier.frontier_columns(frontier_record)
    frontier_record["cost_per_hour"] = 8.0
    frontier_record["frontier"][0]["cost_per_million_output_tokens"] = 7.41
    place = frontier.frontier_columns(frontier_record).index("cost/Mtok")
    assert [row[place] for row in frontier.frontier_rows(frontier_record)] == ["7.41", "-", "-"]


def test_open_stretches_lie_between_points(frontier_record):
    assert frontier.open_steps(frontier_record) == [(2.0, 4.0, 3.0, 6.0), (4.0, 9.0, 6.0, 8.0)]
    assert frontier.policy_points(frontier_record)["WAA"] == [(9.0, 8.0)]


def test_table_fits_and_an_empty_frontier_is_said(frontier_record, solve_record):
    console = Console(file=io.StringIO(), width=WIDTH)
    frontier_table(solve_record, console)
    assert console.file.getvalue() == ""
    frontier_table(frontier_record, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "B_E 8, N_D 4, m 2, TP 1" in text
    frontier_table({**solve_record, "frontier": []}, console)
    assert "no schedule under any latency bound" in console.file.getvalue()


@pytest.mark.parametrize("status", ["ok", "infeasible"])
def test_plot_is_a_picture(frontier_record, status, tmp_path):
    path = tmp_path / "pareto.png"
    write_frontier({**frontier_record, "status": status}, path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1200, 750)


def test_page_shows_points_and_curves(frontier_record, tmp_path):
    path = tmp_path / "report.html"
    write_report(path, {"status": "ok", "command": "solve", "solve": frontier_record})
    html = path.read_text()
    assert "Throughput under every latency bound" in html
    assert "loses at most 50.0 %" in html
    # Curves and the chosen schedule are named in the plot's legend, which is text.
    for label in (">RRA<", ">WAA<", ">chosen: RRA<", ">bound 5.00 s<"):
        assert label in html
