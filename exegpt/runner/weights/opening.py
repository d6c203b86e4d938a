"""Opens located weights, after comparing the configuration that lies beside them with the model's."""

from __future__ import annotations

import math
from dataclasses import fields

from exegpt.errors import WeightsError
from exegpt.hf_config import read_hf_config
from exegpt.runner.weights.gguf_config import gguf_model_spec
from exegpt.runner.weights.gguf_weights import GgufWeights
from exegpt.runner.weights.location import WeightsLocation
from exegpt.runner.weights.random_weights import RandomWeights
from exegpt.runner.weights.reader import WeightReader
from exegpt.runner.weights.safetensors_weights import SafetensorsWeights
from exegpt.specs import ModelSpec

# A name is the user's, and a shorter window than the model's is a fair choice.
_FREE_FIELDS = ("name", "max_position_embeddings")
# GGUF metadata is float32.
_RELATIVE_TOLERANCE = 1e-6


def open_weights(location: WeightsLocation, model: ModelSpec, seed: int) -> WeightReader:
    """Open the weights at `location` for `model`.

    Shapes alone do not tell two models apart (9 heads of 64 look like 18 of 32, and no shape shows
    the base of the rotary frequencies), so the configuration that comes with the weights, GGUF
    metadata or `config.json`, must agree with `model`; without it only `check_weights` stands.

    Parameters
    ----------
    location : WeightsLocation
        From `resolve_weights`.
    model : ModelSpec
        The model to be run.
    seed : int
        Seed of random weights; unused for others.

    Raises
    ------
    WeightsError
        If a file is corrupt or belongs to another model.
    """
    if location.kind == "random":
        return RandomWeights(model, seed)
    if location.path is None:
        raise WeightsError(f"{location.kind} weights of {model.name} need a path (model.weights)")
    if location.kind == "gguf":
        _compare(gguf_model_spec(location.path, model.name), model, str(location.path))
        return GgufWeights(location.path)
    if location.directory is not None and (location.directory / "config.json").exists():
        file = location.directory / "config.json"
        _compare(read_hf_config(file, name=model.name), model, str(file))
    return SafetensorsWeights(location.path)


def _compare(found: ModelSpec, model: ModelSpec, source: str) -> None:
    for field in fields(ModelSpec):
        theirs, ours = getattr(found, field.name), getattr(model, field.name)
        if isinstance(theirs, float):
            same = math.isclose(theirs, ours, rel_tol=_RELATIVE_TOLERANCE)
        else:
            same = theirs == ours
        if not same and field.name not in _FREE_FIELDS:
            raise WeightsError(
                f"{source}: the weights have {field.name}={theirs}, but model.{field.name}={ours} of "
                f"{model.name}; name the weights of this model (model.weights), or set the key to theirs"
            )
