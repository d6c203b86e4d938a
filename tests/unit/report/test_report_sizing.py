import io

import pytest
from rich.console import Console

from exegpt.report import sizing_rows as sizing
from exegpt.report.html import write_report
from exegpt.report.tables import WIDTH, sizing_table


def size(num_gpus, rate, **more):
    found = {"num_gpus": num_gpus, "num_nodes": 1, "gpus_per_node": num_gpus, "cost_per_hour": None}
    if rate is None:
        return {**found, "infeasible": "the weights [x] fit nowhere"}
    knobs = {"encode_batch_size": 8, "num_micro_batches": 1, "tp_size": 1}
    return {
        **found,
        "policy": "RRA",
        "num_replicas": 1,
        "knobs": knobs,
        "throughput_per_s": rate,
        "throughput_upper_per_s": rate,
        "latency_s": 2.0,
        **more,
    }


@pytest.fixture
def sizing_record():
    return {
        "rate_per_s": 12.0,
        "greatest_rate_per_s": 15.0,
        "groups": None,
        "sizes": [size(1, None), size(2, 11.0), size(4, 15.0)],
        "num_gpus": 4,
        "num_nodes": 1,
        "gpus_per_node": 4,
        "headroom": 0.25,
        "cost_per_hour": None,
    }


def test_sizes_say_what_they_hold_or_why_not(sizing_record):
    rows = sizing.sizing_rows(sizing_record)
    assert [row[:3] for row in rows] == [("1", "1 x 1", "-"), ("2", "1 x 2", "11.0"), ("4", "1 x 4", "15.0")]
    assert rows[0][-1] == "none: the weights [x] fit nowhere"
    assert "Fewest GPUs for 12 requests/s: 4, with 25.0 % headroom" in sizing.sizing_title(sizing_record)
    assert sizing.sizing_facts(sizing_record) == []


def test_costs_and_groups_are_said_where_there_are_any(sizing_record):
    sizing_record |= {"groups": [2, 1], "cost_per_hour": 7.2, "cost_per_million_output_tokens": 4.0}
    sizing_record["sizes"][2]["cost_per_hour"] = 7.2
    assert "cost/h" in sizing.sizing_columns(sizing_record)
    assert [row[4] for row in sizing.sizing_rows(sizing_record)] == ["-", "-", "7.20"]
    cost, groups = sizing.sizing_facts(sizing_record)
    assert cost == "at this rate 4.00 per million output tokens (7.20 per hour)"
    assert groups.startswith("independent groups of 2 + 1 = 3 GPUs")


def test_no_size_is_said(sizing_record):
    del sizing_record["num_gpus"]
    assert sizing.sizing_title(sizing_record).startswith("No size of the cluster holds 12 requests/s")


def test_table_and_page_show_it(sizing_record, solve_record, tmp_path):
    console = Console(file=io.StringIO(), width=WIDTH)
    sizing_table(solve_record, console)
    assert console.file.getvalue() == ""
    record = {**solve_record, "sizing": sizing_record}
    sizing_table(record, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "the weights [x] fit nowhere" in text
    path = tmp_path / "report.html"
    write_report(path, {"status": "ok", "command": "solve", "solve": record})
    assert "every smaller size is proven to hold less" in path.read_text()
