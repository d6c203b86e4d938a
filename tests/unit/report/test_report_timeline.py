import json
from collections import defaultdict

import pytest

from exegpt.events import StageEvent
from exegpt.report.timeline import trace_events, write_trace


def test_trace_keeps_every_event(served, tmp_path):
    _, events = served
    path = tmp_path / "trace.json"
    write_trace(events, path)
    trace = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    assert len(spans) == len(events)
    busy_s = sum(event.end_s - event.start_s for event in events)
    # Times are rounded to a nanosecond, two per event.
    assert sum(span["dur"] for span in spans) / 1e6 == pytest.approx(busy_s, abs=1e-9 * len(events))
    assert sum(span["args"]["tokens"] for span in spans) == sum(event.num_tokens for event in events)


def test_every_stage_is_a_named_process(served):
    _, events = served
    trace = trace_events(events)
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace
        if event["ph"] == "M" and event["name"] == "process_name"
    }
    assert names == {0: "stage 0 (rank 0)", 1: "stage 1 (rank 1)", 2: "pool"}
    assert {event["pid"] for event in trace if event["ph"] == "X"} == {0, 1}


def test_fields_that_the_format_requires(served):
    _, events = served
    for event in trace_events(events):
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert isinstance(event["tid"], int)
            assert event["ts"] >= 0
            assert event["dur"] >= 0
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        else:
            assert event["ph"] == "M"


def test_neighbours_that_touch_do_not_overlap():
    # A third of a microsecond has no exact decimals: rounding start and duration apart would overlap.
    times = [i * 1e-6 / 3 for i in range(200)]
    events = [
        StageEvent(0, 0, "decode", 0, i + 1, 0, 1, 1, times[i], times[i + 1]) for i in range(len(times) - 1)
    ]
    ends = defaultdict(float)
    for span in trace_events(events):
        if span["ph"] == "X":
            assert span["ts"] >= ends[span["pid"]] - 1e-6
            ends[span["pid"]] = span["ts"] + span["dur"]


def test_pool_counter_ends_at_zero(served):
    _, events = served
    counts = [event["args"]["queries"] for event in trace_events(events) if event["ph"] == "C"]
    assert max(counts) > 0
    assert counts[-1] == 0


def test_no_events_is_an_empty_trace(tmp_path):
    write_trace([], tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
