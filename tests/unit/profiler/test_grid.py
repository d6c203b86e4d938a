"""Interpolation that refuses points outside, and tables that fall nowhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from exegpt.errors import ProfileError, ProfileRangeError
from exegpt.profiler.grid import isotone, make_grid

LINE = make_grid("linear", ("tokens",), ([2, 4, 8],), [1.0, 3.0, 4.0])
PLANE = make_grid("attention", ("queries", "context"), ([1, 4], [10, 30]), [[1.0, 2.0], [3.0, 8.0]])


@pytest.mark.parametrize(("at", "value"), [(0, 0.0), (1, 0.5), (2, 1.0), (3, 2.0), (6, 3.5), (8, 4.0)])
def test_line_by_hand(at, value):
    assert LINE.at(at) == pytest.approx(value)
    assert LINE.at_or_inf(at) == pytest.approx(value)


@pytest.mark.parametrize(
    ("queries", "context", "value"),
    # Below the first context the cost stays; below one query it falls to zero in proportion.
    [(1, 10, 1.0), (4, 30, 8.0), (1, 20, 1.5), (2.5, 20, 3.5), (1, 1, 1.0), (0.5, 10, 0.5), (0, 30, 0.0)],
)
def test_plane_by_hand(queries, context, value):
    assert PLANE.at(queries, context) == pytest.approx(value)
    assert PLANE.at_or_inf(queries, context) == pytest.approx(value)


def test_outside_is_refused_by_name():
    with pytest.raises(ProfileRangeError, match=r"tokens=9 is outside 0\.\.8, the range profiled for linear"):
        LINE.at(9)
    with pytest.raises(ProfileRangeError, match=r"context=31 is outside 0\.\.30"):
        PLANE.at(1, 31)
    assert LINE.at_or_inf([1, 9]).tolist() == [0.5, np.inf]
    assert PLANE.at_or_inf([1, 5, 1], [10, 10, 31]).tolist() == [1.0, np.inf, np.inf]
    assert PLANE.covers([1, 5], [10, 10]).tolist() == [True, False]


@given(arrays(np.float64, (4, 5), elements=st.floats(0, 1e3)))
@settings(deadline=None)
def test_isotone_falls_nowhere_and_stays_in_range(values):
    found = isotone(values)
    assert (np.diff(found, axis=0) >= -1e-9).all()
    assert (np.diff(found, axis=1) >= -1e-9).all()
    assert found.min() >= values.min() - 1e-9
    assert found.max() <= values.max() + 1e-9
    assert isotone(found) == pytest.approx(found)


@given(arrays(np.float64, (3, 4), elements=st.floats(0, 10)), st.floats(0, 4), st.floats(0, 40))
@settings(deadline=None)
def test_scalar_and_vector_lookups_agree(values, queries, context):
    grid = make_grid("x", ("queries", "context"), ([1, 2, 4], [5, 10, 20, 40]), values)
    assert grid.at(queries, context) == pytest.approx(float(grid.at_or_inf(queries, context)), abs=1e-12)


def test_repair_is_said():
    assert make_grid("x", ("tokens",), ([1, 2, 3],), [1.0, 3.0, 2.0]).repaired == pytest.approx(0.25)
    assert LINE.repaired == 0.0


@pytest.mark.parametrize(
    ("axes", "values", "said"),
    [
        ([[1, 2]], [1.0, np.nan], "finite and not negative"),
        ([[1, 2]], [1.0, -1.0], "finite and not negative"),
        ([[1, 2]], [1.0], "values have shape"),
        ([[2, 1]], [1.0, 2.0], "axis tokens must increase"),
        ([[0, 1]], [1.0, 2.0], "axis tokens must increase"),
        ([[]], [], "values have shape"),
    ],
)
def test_bad_tables_are_refused(axes, values, said):
    with pytest.raises(ProfileError, match=said):
        make_grid("x", ("tokens",), axes, values)
