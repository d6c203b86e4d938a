"""Model shapes from Hugging Face `config.json` files.

Only what `ModelSpec` describes exactly is read; a config that asks for anything else (another
architecture, another scaling of the rotary frequencies, attention in a sliding window, layers of several
kinds, quantised weights) is refused by name, because a plan or a token from the wrong model helps nobody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exegpt.errors import ConfigError, ModelError
from exegpt.hf_families import BUILDERS
from exegpt.hf_keys import HfKeys
from exegpt.specs import ModelSpec


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
        If there is no such file, or it is no JSON object.
    ModelError
        If `model_from_hf` refuses it.
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
    try:
        return model_from_hf(config, name=name or default, source=str(file))
    except ConfigError as error:
        raise ModelError(str(error)) from error


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
        If the architecture is not one of `gpt2`, `llama`, `mistral`, `mixtral`, `opt`, `qwen2`, `qwen3`,
        `qwen3_moe`, `t5`, a key is missing or of another type, or the config asks for something that
        `ModelSpec` does not describe.
    """
    keys = HfKeys(config, source)
    model_type = keys.text("model_type")
    if model_type not in BUILDERS:
        architectures = config.get("architectures")
        classes = f" ({', '.join(map(str, architectures))})" if isinstance(architectures, list) else ""
        raise keys.error(
            "model_type",
            f"={model_type!r}{classes} is not supported; known architectures: {sorted(BUILDERS)}",
        )
    if keys.has("quantization_config"):
        raise keys.error(
            "quantization_config", " is not supported; use the unquantised checkpoint or a GGUF file"
        )
    return BUILDERS[model_type](keys, model_type, name)
