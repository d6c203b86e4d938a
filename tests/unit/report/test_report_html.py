import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from exegpt.events import StageEvent
from exegpt.report import plots
from exegpt.report.html import write_report
from exegpt.report.summary import relative_errors, summarise_run

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Collects text and captions; fails on tags that do not close in order."""

    def __init__(self, html):
        super().__init__()
        self.open, self.text, self.captions, self.attributes = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)
        if "figcaption" in self.open:
            self.captions.append(data)


@pytest.fixture
def report(tmp_path):
    def write(result, **data):
        path = tmp_path / "report.html"
        write_report(path, result, **data)
        html = path.read_text()
        page = Page(html)
        # Self-contained: nothing is fetched and nothing runs.
        for name, value in page.attributes:
            if name in ("href", "src", "xlink:href"):
                assert value.startswith("#")
        assert not re.search(r"url\((?!#)|@import|<script|<link|<image", html)
        return page

    return write


@pytest.fixture
def full_result(served, solve_record):
    records, events = served
    run = summarise_run(records, events)
    run |= {"predicted": dict(run), "error": relative_errors(run, run)}
    return {
        "status": "ok",
        "command": "up",
        "model": {"name": "<b>tiny</b>", "num_hidden_layers": 30},
        "workload": "task T & more",
        "bound": {"latency_s": 5.0, "ttft_s": float("inf")},
        "overrides": ["bound.latency_s=5"],
        "wall_s": 31.2,
        "solve": solve_record,
        "run": run,
        "steady": {"throughput_per_s": 13.0, "latency_s": 4.0},
    }


def test_run_shows_everything(report, full_result, served):
    records, events = served
    pmf = np.full(9, 1 / 9)
    page = report(
        full_result,
        events=events,
        records=records,
        predicted_events=events,
        predicted_records=records,
        planned_output_pmf=pmf,
    )
    assert [caption.split(" (")[0] for caption in page.captions] == [
        "Throughput of policies and baselines, each at its best",
        "Pipeline in the first cycles",
        "Active pool over time",
        "Latency of the complete queries",
        "Output lengths",
        "Spread of stage time from cycle to cycle",
    ]
    text = " ".join(page.text)
    for part in (
        "<b>tiny</b>",
        "task T & more",
        "latency_s 5.00 s",
        "Chosen schedule",
        "B_E 32",
        "Predicted and measured",
        "+0.0 %",
        "latency at the bound's length 4.00 s",
        "80 of 80 completed",
        "31.2 s",
        "measured",
        "predicted",
        "planned",
        "bound 5.00 s",
    ):
        assert part in text


def test_solve_alone_has_only_the_plot_that_makes_sense(report, solve_record):
    page = report({"status": "ok", "command": "solve", "solve": solve_record})
    assert page.captions == ["Throughput of policies and baselines, each at its best"]


def test_infeasible_answer_has_no_plot(report, infeasible_record):
    page = report({"status": "infeasible", "command": "solve", "solve": infeasible_record})
    assert page.captions == []
    text = " ".join(page.text)
    assert "status: infeasible" in text
    assert "relax bound.latency_s from 0.5 s to 1.25 s" in text


def test_failed_job_shows_its_error(report):
    page = report({"status": "failed", "command": "run", "error": "LaunchError: rank 1 <died>"})
    assert "LaunchError: rank 1 <died>" in " ".join(page.text)


def test_simulation_is_called_replayed(report, served, solve_record):
    records, events = served
    simulate = {"steady": solve_record, "replay": summarise_run(records, events)}
    page = report(
        {"status": "ok", "command": "simulate", "simulate": simulate}, events=events, records=records
    )
    text = " ".join(page.text)
    assert "replayed" in text
    assert "measured" not in text


def test_run_in_which_nothing_completed(report, served):
    _, events = served
    page = report({"status": "ok", "command": "run", "run": summarise_run([], [])}, events=events[:3])
    assert [caption.split(" (")[0] for caption in page.captions] == [
        "Pipeline in the first cycles",
        "Active pool over time",
    ]


def test_events_without_decoding(report):
    events = [StageEvent(0, 0, "encode", 0, 0, 0, 1, 5, 0.0, 1.0)]
    page = report({"status": "ok", "command": "run"}, events=events)
    assert any("Pipeline" in caption for caption in page.captions)


def test_gantt_takes_whole_cycles_while_it_can(served):
    _, events = served
    assert {event.cycle for event in plots.gantt_window(events)} == {0, 1, 2}
    many = [StageEvent(0, 0, "decode", cycle, i, 0, 1, 1, i, i + 1) for cycle in (7, 8) for i in range(300)]
    assert {event.cycle for event in plots.gantt_window(many)} == {7}
    assert len(plots.gantt_window(many)) == 300
    endless = [StageEvent(0, 0, "decode", 0, i, 0, 1, 1, i, i + 1) for i in range(5000)]
    assert 0 < len(plots.gantt_window(endless)) < 1000


def test_text_takes_the_colour_of_the_page(served):
    _, events = served
    svg = plots.gantt(events)
    assert "currentColor" in svg
    assert "#000000" not in svg


def test_long_lengths_are_binned_without_loss(served):
    records, _ = served
    pmf = np.zeros(3000)
    pmf[2999] = 1.0
    assert "(bins of 75)" in plots.output_lengths(records, pmf)


@pytest.mark.parametrize(
    "module", ["summary", "result_file", "tables", "timeline", "plots", "html", "gather"]
)
def test_matplotlib_is_loaded_only_to_draw(module):
    code = f"import sys, exegpt.report.{module}; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
