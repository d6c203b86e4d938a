"""Model shapes from Hugging Face `config.json` files.

Only what the runtime computes exactly is read; a config that asks for anything else (another
architecture, another scaling of the rotary frequencies, attention in a sliding window, quantised
weights) is refused by name, because a plan or a token from the wrong model helps nobody.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exegpt.errors import ConfigError
from exegpt.specs import ModelFamily, ModelSpec, RopeScaling

_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class _Keys:
    """Checked access to the values of one config; errors name the file and the key."""

    values: Mapping[str, Any]
    source: str
    prefix: str = ""

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.source}: {self.prefix}{key}{problem}")

    def has(self, key: str) -> bool:
        """Whether `key` is given; null counts as absent, as in transformers."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int or value < 1:
            raise self.error(key, f"={value!r} must be an integer of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, f"={value!r} must be a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.error(key, f"={value!r} must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if type(value) is not str or not value:
            raise self.error(key, f"={value!r} must be a name")
        return value

    def only(self, key: str, expected: bool, why: str) -> None:
        """Refuse the config if the flag `key` is given and is not `expected`."""
        if self.flag(key, expected) is not expected:
            found = str(not expected).lower()
            raise self.error(key, f"={found} is not supported ({why}); allowed: {str(expected).lower()}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, " is missing; the model's shape cannot be told without it")
        return value


def read_hf_config(path: Path, *, name: str | None = None) -> ModelSpec:
    """Shape of the model in a Hugging Face directory or `config.json`.

    Parameters
    ----------
    path : Path
        A directory that holds `config.json`, or the file itself.
    name : str, optional
        Name of the model in schedules and reports; the directory's name by default (for a file
        with another name than `config.json`, the file's).

    Raises
    ------
    ConfigError
        If there is no such file, it is no JSON object, or `model_from_hf` refuses it.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "the directory has no config.json" if path.is_dir() else "no such file or directory"
        raise ConfigError(
            f"model.path={path}: {hint}; name a Hugging Face model directory or its config.json"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.path={file}: cannot be read as text: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON, corrupt or truncated: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: expected a JSON object of config keys, found {type(config).__name__}")
    default = file.resolve().parent.name if file.name == "config.json" else file.stem.removesuffix(".config")
    return model_from_hf(config, name=name or default, source=str(file))


def model_from_hf(config: Mapping[str, Any], *, name: str, source: str) -> ModelSpec:
    """Shape of the model that a Hugging Face config describes.

    Parameters
    ----------
    config : mapping
        The values of a `config.json`, of transformers 4 or 5.
    name : str
        Name of the model in schedules and reports.
    source : str
        Where the values came from, for messages.

    Raises
    ------
    ConfigError
        If the architecture is not one of `llama`, `mistral`, `opt`, `qwen2`, `qwen3`, a key is
        missing or of another type, or the config asks for something the runtime does not compute.
    """
    keys = _Keys(config, source)
    model_type = keys.text("model_type")
    if model_type not in _BUILDERS:
        architectures = config.get("architectures")
        classes = f" ({', '.join(map(str, architectures))})" if isinstance(architectures, list) else ""
        raise keys.error(
            "model_type",
            f"={model_type!r}{classes} is not supported; known architectures: {sorted(_BUILDERS)}",
        )
    if keys.has("quantization_config"):
        raise keys.error(
            "quantization_config", " is not supported; use the unquantised checkpoint or a GGUF file"
        )
    return _BUILDERS[model_type](keys, model_type, name)


def _llama(keys: _Keys, model_type: str, name: str) -> ModelSpec:
    heads = keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    # The classes of Qwen and Mistral have defaults of their own (32 and 8 K/V heads), which a
    # file that leaves the key out hardly means; only LLaMA's default is "as many as heads".
    kv_heads = keys.integer("num_key_value_heads", heads if model_type == "llama" else None)
    if model_type == "qwen3":
        head_dim = keys.integer("head_dim")
    elif keys.has("head_dim"):
        head_dim = keys.integer("head_dim")
    elif hidden_size % heads:
        raise keys.error(
            "hidden_size",
            f"={hidden_size} is no multiple of num_attention_heads={heads} and head_dim is absent",
        )
    else:
        head_dim = hidden_size // heads
    max_positions = keys.integer("max_position_embeddings")
    _refuse_sliding_window(keys, model_type, max_positions)
    theta, scaling = _rope(keys)
    # What has a bias: LLaMA and Qwen3 switch all four attention products, Qwen2 always has it on
    # q, k and v alone, Mistral never (the modelling files of transformers).
    switched = keys.flag("attention_bias", False) if model_type in ("llama", "qwen3") else False
    return ModelSpec(
        name=name,
        family=ModelFamily.LLAMA,
        num_hidden_layers=keys.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.integer("intermediate_size"),
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=max_positions,
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        hidden_act=keys.text("hidden_act", "silu"),
        norm_eps=keys.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=switched or model_type == "qwen2",
        attention_output_bias=switched,
        mlp_bias=keys.flag("mlp_bias", False) if model_type == "llama" else False,
        qk_norm=model_type == "qwen3",
    )


def _opt(keys: _Keys, model_type: str, name: str) -> ModelSpec:
    heads = keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    keys.only("do_layer_norm_before", True, "norms come before attention and MLP, as in all OPT but 350M")
    keys.only("_remove_final_layer_norm", False, "the model ends with a norm")
    keys.only("layer_norm_elementwise_affine", True, "norms have weights")
    if keys.integer("word_embed_proj_dim", hidden_size) != hidden_size:
        raise keys.error(
            "word_embed_proj_dim",
            f"={keys.values['word_embed_proj_dim']} is not supported; allowed: hidden_size={hidden_size}",
        )
    if hidden_size % heads:
        raise keys.error("hidden_size", f"={hidden_size} is no multiple of num_attention_heads={heads}")
    bias = keys.flag("enable_bias", True)
    return ModelSpec(
        name=name,
        family=ModelFamily.OPT,
        num_hidden_layers=keys.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads,
        intermediate_size=keys.integer("ffn_dim"),
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", True),
        hidden_act=keys.text("activation_function", "relu"),
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
    )


_BUILDERS: Mapping[str, Callable[[_Keys, str, str], ModelSpec]] = {
    "llama": _llama,
    "mistral": _llama,
    "opt": _opt,
    "qwen2": _llama,
    "qwen3": _llama,
}


def _refuse_sliding_window(keys: _Keys, model_type: str, max_positions: int) -> None:
    """Raise if any layer would attend to less than the whole context."""
    if model_type == "llama":
        return
    if model_type == "mistral":
        # Null switches the window off; a file without the key means the class's default of 4096.
        window = 4096 if "sliding_window" not in keys.values else keys.values["sliding_window"]
    else:
        # Qwen files carry a window that `use_sliding_window` switches on, for the later layers.
        layer_types = keys.values.get("layer_types")
        if isinstance(layer_types, list):
            windowed = "sliding_attention" in layer_types
        else:
            windowed = keys.integer("max_window_layers", 28) < keys.integer("num_hidden_layers")
        if not keys.flag("use_sliding_window", False) or not windowed:
            return
        window = keys.values.get("sliding_window")
    if window is not None and keys.integer("sliding_window", window) < max_positions:
        raise keys.error(
            "sliding_window",
            f"={window} is below max_position_embeddings={max_positions}: attention in a window is not "
            "supported; serve shorter contexts by lowering max_position_embeddings to the window",
        )


def _rope(keys: _Keys) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary frequencies.

    transformers 5 writes `rope_parameters` {rope_type, rope_theta, ...}, earlier ones `rope_theta`
    and `rope_scaling` {rope_type (or type), ...}.
    """
    block = "rope_parameters" if keys.has("rope_parameters") else "rope_scaling"
    values = keys.values.get(block)
    # 10,000 is the default of every class that is read here.
    theta = keys.number("rope_theta", 10_000.0)
    _refuse_partial_rotation(keys)
    if values is None:
        return theta, None
    if not isinstance(values, Mapping):
        raise keys.error(block, f"={values!r} must be an object")
    if any(isinstance(value, Mapping) for value in values.values()):
        raise keys.error(block, " differs between kinds of layers, which is not supported")
    rope = _Keys(values, keys.source, f"{block}.")
    theta = rope.number("rope_theta", theta)
    _refuse_partial_rotation(rope)
    rope_type = rope.text("rope_type", rope.text("type", "default"))
    if rope_type not in _ROPE_TYPES:
        raise rope.error("rope_type", f"={rope_type!r} is not supported; known: {list(_ROPE_TYPES)}")
    if rope_type == "default":
        return theta, None
    if rope_type == "linear":
        return theta, RopeScaling(rope_type=rope_type, factor=rope.number("factor"))
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error("low_freq_factor", f"={low} must be below high_freq_factor={high}")
    return theta, RopeScaling(
        rope_type=rope_type,
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )


def _refuse_partial_rotation(keys: _Keys) -> None:
    factor = keys.number("partial_rotary_factor", 1.0)
    if factor != 1.0:
        raise keys.error("partial_rotary_factor", f"={factor} must be 1: heads are rotated as a whole")
