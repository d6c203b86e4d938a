import math

import pytest

from exegpt.report.units import (
    format_gib,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    ratio_of,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (4.2e-5, "42.0 us"),
        (0.0421, "42.1 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (123.4, "123 s"),
        (4321.0, "4,320 s"),
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "none"),
    ],
)
def test_seconds_have_three_digits_and_a_unit(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9.995, "9.99"),
        (9.999, "10.0"),
        (0.00123, "0.00123"),
        (-15.5, "-15.5"),
        (1580.0, "1,580"),
        (math.inf, "-"),
    ],
)
def test_numbers_have_three_significant_digits(value, text):
    assert format_number(value) == text


def test_other_units():
    assert format_gib(48 * 2**30) == "48.0 GiB"
    assert format_percent(-0.047, sign=True) == "-4.7 %"
    assert format_percent(0.5) == "50.0 %"
    assert format_ratio(2.4196) == "2.42x"
    assert format_gib(None) == format_percent(None) == format_ratio(math.nan) == "-"


def test_ratio_needs_both_sides():
    assert ratio_of(3.0, 2.0) == 1.5
    assert ratio_of(None, 2.0) is None
    assert ratio_of(3.0, 0.0) is None
