"""The arithmetic behind docs/reproduction.md."""

from __future__ import annotations

import numpy as np
import pytest
from paper.case_facts import BOUND_LENGTH, TABLE_6, printed_identity_s
from paper.case_study import middle
from paper.report import Claim, Section, page, table
from paper.sweeps import Sweep, breaks, latency_breaks, throughput_breaks

from exegpt.specs import Policy


def test_a_rising_sweep_breaks_nowhere():
    assert breaks(np.array([1.0, 2.0, 2.0, 5.0]), 0.0) == 0


def test_every_point_below_the_greatest_before_it_breaks():
    # 2 and 2.5 lie below 3; 3 does not lie below itself.
    assert breaks(np.array([1.0, 3.0, 2.0, 2.5, 3.0]), 0.0) == 2


def test_what_lies_within_the_tolerance_does_not_break():
    assert breaks(np.array([1.0, 3.0, 2.0, 2.5]), 0.6) == 1


@pytest.mark.parametrize("values", [[], [1.0]])
def test_a_sweep_of_one_point_has_nothing_to_break(values):
    assert breaks(np.array(values), 0.0) == 0


def test_throughput_is_measured_against_what_was_achieved_and_latency_against_the_bound():
    sweep = Sweep("RRA B_E", np.array([10.0, 9.6, 9.4]), np.array([10.0, 9.6, 9.4]))
    assert throughput_breaks(sweep, 0.05) == 1
    # 5 % of a bound of 8 s is 0.4 s: only the last lies further below 10 s.
    assert latency_breaks(sweep, 0.05, bound_s=8.0) == 1
    assert latency_breaks(sweep, 0.05, bound_s=20.0) == 0


def test_the_closed_form_gives_the_latencies_that_the_paper_prints_for_rra():
    rows = [row for row in TABLE_6 if row.policy is Policy.RRA]
    assert BOUND_LENGTH == 63
    for row in rows:
        assert printed_identity_s(row) == pytest.approx(row.latency_s, rel=2e-3)


def test_half_the_range_that_holds_99_percent():
    mean, half = middle(list(np.linspace(0.0, 200.0, 201)))
    assert (mean, half) == (pytest.approx(100.0), pytest.approx(99.0))


def test_a_claim_that_differs_says_why():
    claim = Claim(where="table 1", paper="3", ours="2", agrees=False, why="of this")
    assert claim.verdict == "**differs**: of this"
    assert Claim(where="table 1", paper="3", ours="4", agrees=True, why="of this").verdict == "agrees"
    assert "nothing" not in Claim(where="-", paper="-", ours="4", agrees=None).verdict


def test_cells_cannot_break_a_table():
    assert table(["a", "b"], [["x|y", None]], right=[1]).splitlines() == [
        "| a | b |",
        "| --- | --: |",
        "| x\\|y | - |",
    ]


def test_the_page_counts_only_what_can_be_compared():
    claims = [Claim(where="t", paper="p", ours="o", agrees=agrees) for agrees in (True, False, None)]
    text = page([Section(title="One", claims=claims, body="body")], command="c", machine="m", wall_s=1.4)
    assert "Of 2 statements 1 agree" in text
    assert text.index("## All statements") < text.index("## One")
