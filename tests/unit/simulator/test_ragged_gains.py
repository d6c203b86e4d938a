"""What unequal micro-batches add to an encode phase, against phases played job by job."""

import numpy as np
import pytest

from exegpt.simulator.pipeline import phase_s
from exegpt.simulator.ragged import ragged_gains_s


def played_s(stage_s, deviation_s, num_jobs, num_phases=4000):
    """Mean time for jobs that are longer on every stage alike, by a normal number of deviations."""
    rng = np.random.default_rng(0)
    free = np.zeros((num_phases, len(stage_s)))
    for longer in rng.standard_normal((num_jobs, num_phases)):
        left = free[:, 0]
        for j, (mean, deviation) in enumerate(zip(stage_s, deviation_s, strict=True)):
            left = free[:, j] = np.maximum(free[:, j], left) + mean + deviation * longer
    return free[:, -1].mean()


@pytest.mark.parametrize("num_jobs", [2, 4, 15])
@pytest.mark.parametrize(
    "stage_s",
    [
        [1.0, 1.0],
        [1.0, 1.0, 1.0, 1.0],
        [1.0] * 11 + [1.1],
        [1.0, 1.07, 1.0, 0.98],
        [1.0, 1.0, 0.5, 0.5],
        [0.6, 0.8, 1.0],
        [1.0, 0.3, 0.9],
    ],
)
def test_a_phase_of_ragged_jobs_takes_what_it_takes_when_played(stage_s, num_jobs):
    times = np.array(stage_s)
    deviation = 0.25 * times
    gain = ragged_gains_s(times, deviation, num_jobs)[0, -1]
    played = played_s(times, deviation, num_jobs)
    # Of each long job the mean advantage is taken as if the others did not bind it to come first or last.
    assert phase_s(times, num_jobs) + gain == pytest.approx(played, rel=0.015)


def test_a_path_over_a_stage_alone_gains_nothing_and_one_job_never_does():
    times = np.array([[1.0, 2.0, 1.5], [1.0, 1.0, 1.0]])
    gains = ragged_gains_s(times, 0.3 * times, 5)
    assert np.array_equal(gains, np.triu(gains, 1))
    assert (gains[:, 0, 1:] > 0).all()
    assert np.abs(ragged_gains_s(times, 0.3 * times, 1)).max() == pytest.approx(0, abs=1e-9)
