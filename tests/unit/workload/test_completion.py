import numpy as np
import pytest
from scipy import stats

from exegpt.errors import ConfigError
from exegpt.specs import Counting
from exegpt.workload.completion import Completion
from exegpt.workload.lengths import fixed_pmf, independent, joint, truncated_normal_pmf


def task_s(rounding="up"):
    """Outputs of the paper's task S."""
    if rounding == "up":
        return independent(fixed_pmf(256), truncated_normal_pmf(32, 13, 80)[0])
    # Parent normal of paper.md, section 6.2, computed there apart from this package.
    parent = stats.truncnorm(-31.6751 / 13.4186, (80 - 31.6751) / 13.4186, 31.6751, 13.4186)
    pmf = np.diff(parent.cdf(np.clip(np.arange(-1, 81) + 0.5, 0, 80)), prepend=0)[1:]
    return independent(fixed_pmf(256), np.append(0, pmf[1:]) / pmf[1:].sum())


@pytest.fixture
def correlated():
    rng = np.random.default_rng(7)
    outputs = rng.geometric(0.06, size=600)
    inputs = 5 + outputs + rng.integers(0, 30, size=600)
    return joint(np.column_stack([inputs, outputs]))


def simulate(inputs, iterations, n_d, batch, num_cycles):
    """Active queries and summed context of a pool fed with `batch` queries a cycle; (cycles, n_d) each."""
    iterations = iterations[: num_cycles * batch].reshape(num_cycles, batch)
    inputs = inputs[: num_cycles * batch].reshape(num_cycles, batch)
    warm = -(-int(iterations.max()) // n_d)
    active, context = (np.zeros((num_cycles - warm, n_d)) for _ in range(2))
    for back in range(warm + 1):
        cohort = slice(warm - back, num_cycles - back)
        for u in range(n_d):
            age = back * n_d + u
            alive = iterations[cohort] > age
            active[:, u] += alive.sum(axis=1)
            context[:, u] += (alive * (inputs[cohort] + 1 + age)).sum(axis=1)
    return active, context


def test_survival_by_hand():
    lengths = joint(np.array([[10, 1], [20, 2], [30, 4], [40, 4]]))
    exact = Completion(lengths)
    np.testing.assert_allclose(exact.survival, [0.75, 0.5, 0.5, 0])
    assert exact.mean_iterations == pytest.approx((0 + 1 + 3 + 3) / 4)
    assert exact.max_iterations == 3
    # Mean input of those still active, one token of their own and their age.
    np.testing.assert_allclose(exact.context, [30 + 1, 35 + 2, 35 + 3, 0])
    encoder_decoder = Completion(lengths, first_token_at_encoding=False)
    np.testing.assert_allclose(encoder_decoder.survival, [1, 0.75, 0.5, 0.5, 0])


def test_iterations_of():
    assert Completion(task_s()).iterations_of(63) == 62
    assert Completion(task_s(), Counting.paper).iterations_of(63) == 63
    assert Completion(task_s(), first_token_at_encoding=False).iterations_of(63) == 63
    with pytest.raises(ConfigError, match="at least 1 output token"):
        Completion(task_s()).iterations_of(0)


@pytest.mark.parametrize(("rounding", "sums"), [("nearest", (0.403, 0.246)), ("up", (0.397, 0.242))])
def test_published_completion_sums(rounding, sums):
    completion = Completion(task_s(rounding), Counting.paper)
    for n_d, expected in zip((13, 7), sums, strict=True):
        assert 1 / completion.start_pool_per_query(n_d) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(
    ("n_d", "batch", "paper", "pool", "active"), [(13, 52, 129, 152, 128), (7, 49, 199, 245, 224)]
)
def test_pools_of_the_papers_table_6(n_d, batch, paper, pool, active):
    lengths = task_s("nearest")
    exact = Completion(lengths, first_token_at_encoding=False)
    assert batch * exact.start_pool_per_query(n_d) == pytest.approx(pool, abs=0.6)
    assert batch * exact.active_per_query(n_d).mean() == pytest.approx(active, abs=0.6)
    assert batch * Completion(lengths, Counting.paper).start_pool_per_query(n_d) == pytest.approx(
        paper, abs=0.6
    )


@pytest.mark.parametrize("n_d", [1, 3, 8, 40, 500])
def test_exact_pool_against_direct_expectations(correlated, n_d):
    completion = Completion(correlated)
    inputs, outputs = correlated.pairs.T
    d = outputs - 1
    assert completion.start_pool_per_query(n_d) == pytest.approx(np.ceil(d / n_d).mean())
    active, context = completion.active_per_query(n_d), completion.context_per_query(n_d)
    assert active.shape == context.shape == (n_d,)
    # Little: a cycle's iterations serve E[D] per encoded query.
    assert active.sum() == pytest.approx(d.mean())
    # A query attends to input + 1, .., input + D tokens over its life.
    assert context.sum() == pytest.approx((d * inputs + d * (d + 1) / 2).mean())


@pytest.mark.parametrize("n_d", [2, 5, 13])
def test_exact_pool_against_monte_carlo(correlated, n_d):
    batch, num_cycles = 20, 3_000
    rng = np.random.default_rng(23)
    inputs, outputs = correlated.sample(rng, batch * num_cycles)
    active, context = simulate(inputs, outputs - 1, n_d, batch, num_cycles)
    completion = Completion(correlated)
    # The largest of 13 means over 3,000 correlated cycles stays within 2 %; variances within 12 %.
    np.testing.assert_allclose(active.mean(axis=0), batch * completion.active_per_query(n_d), rtol=0.02)
    np.testing.assert_allclose(context.mean(axis=0), batch * completion.context_per_query(n_d), rtol=0.02)
    pool_variance = batch * completion.pool_variance_per_query(n_d)
    assert active[:, 0].var() == pytest.approx(pool_variance, rel=0.12)
    mean, variance = completion.pool_tokens_moments(n_d)
    assert context.mean(axis=0).max() == pytest.approx(batch * mean, rel=0.02)
    assert context.var(axis=0).max() == pytest.approx(batch * variance, rel=0.12)


def test_reserve_keeps_overflow_rare(correlated):
    batch, num_cycles, n_d = 40, 4_000, 6
    inputs, outputs = correlated.sample(np.random.default_rng(2), batch * num_cycles)
    _, context = simulate(inputs, outputs - 1, n_d, batch, num_cycles)
    mean, variance = Completion(correlated).pool_tokens_moments(n_d)
    reserve = batch * mean + 3.09 * np.sqrt(batch * variance)
    # A normal pool passes 3.09 deviations once in 1,000 cycles; the sum's skew makes it a few more.
    assert (context.max(axis=1) > reserve).mean() < 5e-3


def test_queries_that_end_at_encoding_hold_their_input():
    mean, variance = Completion(independent(np.array([0, 0.5, 0, 0.5]), fixed_pmf(1))).pool_tokens_moments(4)
    assert (mean, variance) == (pytest.approx(2), pytest.approx(1))


@pytest.mark.parametrize("n_d", [1, 4, 13, 200])
def test_paper_formulas_term_by_term(correlated, n_d):
    completion = Completion(correlated, Counting.paper)
    inputs, lengths = correlated.pairs.T
    phases = np.ceil(lengths / n_d).astype(int)
    # P(U | S) of the paper, section 6, for every observed query.
    completes = np.zeros(n_d)
    for s, c in zip(lengths, phases, strict=True):
        u = s if s <= n_d else 1 + (s - 1) % n_d
        completes[u - 1] += 1 / c / len(lengths)
    pool = 1 / completes.sum()
    assert completion.start_pool_per_query(n_d) == pytest.approx(pool)
    before = np.concatenate([[0], np.cumsum(completes)[:-1]])
    np.testing.assert_allclose(completion.active_per_query(n_d), pool * (1 - before), atol=1e-12)
    tokens = np.zeros(n_d)
    squares = np.zeros(n_d)
    for length, s, c in zip(inputs, lengths, phases, strict=True):
        for phase in range(c):
            for u in range(n_d):
                age = phase * n_d + u
                if age < s:
                    tokens[u] += (length + 1 + age) / c / len(lengths)
                    squares[u] += (length + 1 + age) ** 2 / c / len(lengths)
    np.testing.assert_allclose(completion.context_per_query(n_d), pool * tokens)
    mean, variance = completion.pool_tokens_moments(n_d)
    assert mean == pytest.approx((pool * tokens).max())
    assert variance == pytest.approx((pool * (squares - tokens**2)).max())
    assert completion.pool_variance_per_query(n_d) == 0


def test_cache_stays_small_and_right(monkeypatch, correlated):
    monkeypatch.setattr("exegpt.workload.completion.CACHE_FLOATS", 2_000)
    small = Completion(correlated)
    rows = {n: small.active_per_query(n).copy() for n in range(1, 60)}
    assert small._cached_floats <= 2_000
    monkeypatch.undo()
    large = Completion(correlated)
    for n, row in rows.items():
        np.testing.assert_array_equal(large.active_per_query(n), row)


def test_longest_of_a_batch(correlated):
    completion = Completion(correlated)
    outputs = correlated.pairs[:, 1]
    draws = np.random.default_rng(4).choice(outputs, size=(20_000, 16))
    batches = np.array([16, 1, 4, 16])
    found = completion.expected_max_output(batches)
    assert found[1] == pytest.approx(correlated.mean_output)
    assert found[0] == found[3]
    # Half a per cent is four standard errors here.
    assert found[0] == pytest.approx(draws.max(axis=1).mean(), rel=5e-3)
    assert found[2] == pytest.approx(draws[:, :4].max(axis=1).mean(), rel=1e-2)
    np.testing.assert_allclose(completion.expected_max_iterations(batches), found - 1)
    assert completion.expected_max_output(np.array([1e9]))[0] == pytest.approx(correlated.max_output)


def test_longest_of_constant_lengths():
    completion = Completion(independent(fixed_pmf(5), fixed_pmf(12)))
    np.testing.assert_allclose(completion.expected_max_output(np.array([1.0, 7.5])), [12, 12])
    np.testing.assert_allclose(completion.expected_max_iterations(np.array([1, 100])), [11, 11])


def test_outputs_of_one_token_leave_no_pool():
    completion = Completion(independent(fixed_pmf(5), fixed_pmf(1)))
    assert completion.max_iterations == 0
    assert completion.mean_iterations == 0
    np.testing.assert_array_equal(completion.active_per_query(3), np.zeros(3))
    np.testing.assert_array_equal(completion.context, [0])


def test_bad_arguments():
    completion = Completion(task_s())
    with pytest.raises(ConfigError, match="decode_iterations=0"):
        completion.active_per_query(0)
    with pytest.raises(ConfigError, match=r"batch size 0\.5"):
        completion.expected_max_output(np.array([0.5]))
