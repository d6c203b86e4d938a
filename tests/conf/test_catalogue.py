"""The models of `conf/model`: published sizes, and what their analytic profiles must be like."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from exegpt.hf_config import read_hf_config
from exegpt.profiler.analytic import analytic_profile
from exegpt.profiler.sheet import read_sheet
from exegpt.settings import Job
from exegpt.specs import Dtype, ModelFamily, ModelSpec

CONF = Path(__file__).resolve().parents[2] / "conf"
CATALOGUE = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "hf")
GPT3 = ("gpt3-39b", "gpt3-101b", "gpt3-175b", "gpt3-341b")
# A profile of all degrees is made while a user waits: 12 ms on an idle core, and room for a busy one.
PROFILE_S = 0.1


@pytest.fixture
def model_of(compose_job: Callable[..., Job]) -> Callable[[str], ModelSpec]:
    return lambda option: compose_job(f"model={option}", "workload=fixed").model


@pytest.mark.parametrize(
    ("option", "parameters"),
    [
        # What transformers' models of these shapes hold, to the last one.
        ("t5-11b", 11_307_321_344),
        ("opt-13b", 12_853_473_280),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("qwen3-32b", 32_762_123_264),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_published_sizes(option: str, parameters: int, model_of: Callable[[str], ModelSpec]) -> None:
    model = model_of(option)
    assert (model.name, model.num_parameters) == (option, parameters)


@pytest.mark.parametrize(
    ("option", "billions", "kv_megabytes"),
    [
        # 12 h^2 parameters and 4 h bytes of K/V a layer, from the layers and widths in the paper's Table 1.
        ("opt-13b", 12.6, 0.82),
        ("gpt3-39b", 38.7, 1.57),
        ("gpt3-101b", 100.7, 3.28),
        ("gpt3-175b", 173.9, 4.72),
        ("gpt3-341b", 339.7, 7.37),
    ],
)
def test_sizes_of_the_papers_models(
    option: str, billions: float, kv_megabytes: float, model_of: Callable[[str], ModelSpec]
) -> None:
    model = model_of(option)
    hidden = model.hidden_size
    # Biases and norms of a layer are 13 h.
    matrices = model.num_hidden_layers * (model.layer_parameters - 13 * hidden)
    assert matrices == 12 * model.num_hidden_layers * hidden**2
    # Printed with one decimal, and 4 h bytes a layer with two.
    assert matrices / 1e9 == pytest.approx(billions, abs=0.05)
    assert model.kv_bytes_per_token(Dtype.float16) / 1e6 == pytest.approx(kv_megabytes, abs=0.005)


@pytest.mark.parametrize("option", GPT3)
def test_gpt3_sizes_are_in_their_names(option: str, model_of: Callable[[str], ModelSpec]) -> None:
    model = model_of(option)
    assert model.family is ModelFamily.GPT2
    # Rounded by the paper, up and down.
    named = float(option.removeprefix("gpt3-").removesuffix("b"))
    assert model.num_parameters / 1e9 == pytest.approx(named, rel=0.01)


def test_only_runnable_models_can_name_weights(model_of: Callable[[str], ModelSpec]) -> None:
    planned = {option for option in CATALOGUE if not model_of(option).is_runnable}
    assert planned == {*GPT3, "t5-11b", "mixtral-8x7b"}


@pytest.mark.parametrize(
    ("option", "file", "differing"),
    [
        ("opt-13b", "facebook--opt-13b", set()),
        ("qwen3-32b", "Qwen--Qwen3-32B", set()),
        ("mixtral-8x7b", "mistralai--Mixtral-8x7B-v0.1", set()),
        # Llama 3.1 stretches the positions of Llama 3.
        ("llama-3-8b", "meta-llama--Meta-Llama-3.1-8B", {"rope_scaling", "max_position_embeddings"}),
        ("llama-3-70b", "meta-llama--Meta-Llama-3.1-70B", {"rope_scaling", "max_position_embeddings"}),
        # T5-11B has four times the heads and the width of T5-3B.
        (
            "t5-11b",
            "t5-3b",
            {"num_attention_heads", "num_key_value_heads", "intermediate_size"},
        ),
    ],
)
def test_options_are_the_published_configs(
    option: str, file: str, differing: set[str], data_dir: Path, model_of: Callable[[str], ModelSpec]
) -> None:
    model = model_of(option)
    published = read_hf_config(data_dir / "model_configs" / "hf" / f"{file}.config.json", name=option)
    fields = type(model).__dataclass_fields__
    assert {name for name in fields if getattr(model, name) != getattr(published, name)} == differing


@pytest.mark.parametrize("card", ["a40-48", "a100-80", "h100"])
@pytest.mark.parametrize("option", CATALOGUE)
def test_analytic_profiles_are_finite_isotone_and_quick(
    option: str, card: str, model_of: Callable[[str], ModelSpec]
) -> None:
    model, sheet = model_of(option), read_sheet(card)
    took_s = []
    for _ in range(3):
        started = time.process_time()
        table = analytic_profile(
            model, sheet, dtype=Dtype.float16, tp_sizes=model.tp_sizes(8), num_ranks=48, gpus_per_node=8
        )
        took_s.append(time.process_time() - started)
    assert min(took_s) < PROFILE_S
    grids = table.grids()
    assert {"send", "host_copy", "tp1.linear"} <= grids.keys()
    assert ("tp1.encode_linear" in grids) == ("tp1.cross_attention" in grids) == model.is_encoder_decoder
    for name, grid in grids.items():
        assert np.isfinite(grid.values_s).all(), name
        assert (grid.values_s > 0).all(), name
        # Nothing had to be repaired, so the formula itself falls along no axis.
        assert grid.repaired == 0, name
        for axis in range(grid.values_s.ndim):
            assert (np.diff(grid.values_s, axis=axis) >= 0).all(), name
