import json

import numpy as np
import pytest

from exegpt.errors import TraceError
from exegpt.workload.servegen import average_windows
from exegpt.workload.traces import read_pairs

WINDOWS = {
    "0": {"input_tokens": "{10: 0.25, 12: 0.75}", "output_tokens": "{1: 1.0}"},
    "21600": {"input_tokens": "{12: 1.0}", "output_tokens": "{3: 5e-1, 4: 0.5}"},
    "43200": {"input_tokens": "{}", "output_tokens": "{}"},
}


def test_windows_weigh_the_same():
    windows = average_windows(WINDOWS, source="here")
    assert windows.num_windows == 2
    assert windows.input_pmf[10] == pytest.approx(0.125)
    assert windows.input_pmf[12] == pytest.approx(0.875)
    np.testing.assert_allclose(windows.output_pmf, [0, 0.5, 0, 0.25, 0.25])


def test_windows_from_a_file(tmp_path):
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps(WINDOWS))
    trace = read_pairs(path)
    assert trace.pairs is None
    assert trace.notes == ("1 of 3 windows are empty and are left out",)
    lengths = trace.lengths()
    assert lengths.mean_output == pytest.approx(2.25)
    assert lengths.correlation == pytest.approx(0)


def test_mappings_do_as_well_as_strings():
    windows = average_windows({"0": {"input_tokens": {"5": 1}, "output_tokens": {"2": 1.0}}}, source="here")
    assert windows.input_pmf[5] == windows.output_pmf[2] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{10: 0.5}", "window '0', input_tokens: probabilities sum to 0.5"),
        ("{10: -0.5, 11: 1.5}", "the probability of 10 tokens is -0.5"),
        ("{10: NaN}", "the probability of 10 tokens is nan"),
        ("{0: 1.0}", "length '0' is no whole number from 1"),
        ("{999999999999: 1.0}", "no whole number from 1 to 10000000"),
        ("{10: 1.0", "expected probabilities by length"),
        ("__import__('os')", "expected probabilities by length"),
        ("[1, 2]", "found list"),
        (7, "found int"),
        ({"10": "x"}, "is 'x', must lie in"),
    ],
)
def test_bad_windows(content, message):
    with pytest.raises(TraceError, match=message):
        average_windows(
            {"0": {"input_tokens": content, "output_tokens": "{1: 1.0}"}}, source="workload.path=x"
        )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "no window has any requests"),
        ({"0": {"input_tokens": "{}", "output_tokens": "{}"}}, "no window has any requests"),
        ({"prompt": "hello"}, "key 'prompt' holds no input_tokens and output_tokens"),
        ({"0": {"input_tokens": "{1: 1.0}"}}, "key '0' holds no"),
    ],
)
def test_what_holds_no_windows(data, message):
    with pytest.raises(TraceError, match=message):
        average_windows(data, source="workload.path=x")
