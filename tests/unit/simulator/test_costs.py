"""Stage times of encoder-decoder models against sums written out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import synthetic

from exegpt.errors import ProfileError
from exegpt.profiler.grid import make_grid
from exegpt.simulator.costs import StageCosts, StageShape
from exegpt.specs import ModelFamily

T5 = synthetic.tiny_model(num_layers=6, family=ModelFamily.T5, num_key_value_heads=4)
LLAMA = synthetic.tiny_model(num_layers=6)
STAGES = tuple(StageShape(num_layers=3, tp_size=2, is_first=i == 0, is_last=i == 1) for i in range(2))


def t5_profile():
    """The synthetic profile with an encoder layer twice as dear and a cross attention of its own."""
    profile = synthetic.tiny_profile(T5)
    layers = {
        tp_size: replace(
            costs,
            encode_linear=make_grid(
                "encode_linear", ("tokens",), costs.linear.axes, 2 * costs.linear.values_s
            ),
            cross_attention=make_grid(
                "cross_attention",
                ("queries", "context_tokens"),
                costs.decode_attention.axes,
                3 * costs.decode_attention.values_s,
            ),
        )
        for tp_size, costs in profile.layers.items()
    }
    return replace(profile, layers=layers)


def test_decoding_attends_to_input_and_generated_tokens_apart():
    profile = t5_profile()
    costs, table = StageCosts(profile, T5, STAGES), profile.layers[2]
    own, cross = table.decode_attention.at(8, 700 - 500), table.cross_attention.at(8, 500)
    assert table.all_reduce is not None
    sums = 3 * table.all_reduce.at(8 * 64 * 4)
    layers = 3 * (table.linear.at(8) + own + cross + sums) + table.decode_overhead.at(8)
    first = layers + table.embed.at(8) + profile.send.at(8 * 64 * 4)
    last = layers + table.head.at(8) + profile.send.at(8 * 8)
    assert costs.decode_one_s(8, 700, 500) == pytest.approx([first, last], rel=1e-12)
    # The vectorised form adds the same numbers in another order.
    assert costs.decode_s(8, 700, 500) == pytest.approx([first, last], rel=1e-12)


def test_encoding_has_its_own_layers_and_yields_no_token():
    profile = t5_profile()
    costs, table = StageCosts(profile, T5, STAGES), profile.layers[2]
    assert table.all_reduce is not None
    layer = (
        table.encode_linear.at(600) + table.encode_attention.at(4, 150) + 2 * table.all_reduce.at(600 * 256)
    )
    layers = 3 * layer + table.encode_overhead.at(4)
    # The last stage gives the encoder's output to the others, as the first gave it its own; no head.
    first, last = (
        layers + table.embed.at(600) + profile.send.at(600 * 256),
        layers + profile.send.at(600 * 256),
    )
    assert costs.encode_one_s(4, 600, 150.0) == pytest.approx([first, last], rel=1e-12)
    assert costs.encode_s(4, 600, 150.0) == pytest.approx([first, last], rel=1e-12)


def test_both_forms_agree_and_broadcast():
    costs = StageCosts(t5_profile(), T5, STAGES)
    queries, inputs = np.array([[1], [16]]), np.array([300, 5000, 9000])
    many = costs.decode_s(queries, inputs + 700, inputs)
    assert many.shape == (2, 3, 2)
    for i, q in enumerate([1, 16]):
        for j, n in enumerate(inputs.tolist()):
            assert costs.decode_one_s(q, n + 700, n) == pytest.approx(many[i, j], rel=1e-12)


def test_decoder_only_models_do_not_ask_which_tokens_were_input():
    costs = StageCosts(synthetic.tiny_profile(LLAMA), LLAMA, STAGES)
    assert costs.decode_s(8, 700).tolist() == costs.decode_s(8, 700, 500).tolist()
    assert costs.decode_one_s(8, 700) == costs.decode_one_s(8, 700, 500)


def test_missing_input_tokens_of_an_encoder_decoder_are_no_zero():
    costs = StageCosts(t5_profile(), T5, STAGES)
    with pytest.raises(ValueError, match="decode_s of tiny needs input_tokens"):
        costs.decode_s(8, 700)
    with pytest.raises(ValueError, match="needs the input tokens of its 8 queries"):
        costs.decode_one_s(8, 700)
    assert np.isfinite(costs.decode_one_s(0, 0)).all()


@pytest.mark.parametrize("operator", ["encode_linear", "cross_attention"])
def test_a_profile_without_its_tables_is_refused(operator):
    profile = t5_profile()
    layers = {tp_size: replace(costs, **{operator: None}) for tp_size, costs in profile.layers.items()}
    with pytest.raises(ProfileError, match="lacks encode_linear or cross_attention at tp_size=2"):
        StageCosts(replace(profile, layers=layers), T5, STAGES)
