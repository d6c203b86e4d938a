"""The tiny model on disk, jobs that tests share, and files with something wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from cli_jobs import CONFIG, FIXED, MODEL, Finished, launch, weights, write_gguf
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """`place()` is an empty directory to start a job in."""
    return lambda: tmp_path_factory.mktemp("job")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: configuration, weights and a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 1}))
    save_file(weights(), directory / "model.safetensors")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 2,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )
    return directory


@pytest.fixture(scope="session")
def tiny(model_dir: Path) -> tuple[str, ...]:
    """Overrides of every job here: the model and its two workers."""
    return tuple(text.format(model=model_dir) for text in MODEL)


@pytest.fixture(scope="session")
def profiled(place: Callable[[], Path], tiny: tuple[str, ...]) -> Finished:
    """`command=profile`: measures, and leaves the profile in the cache for all other jobs."""
    return launch(place(), *tiny, *FIXED, "command=profile").succeeded()


@pytest.fixture(scope="session")
def solved(place: Callable[[], Path], tiny: tuple[str, ...], profiled: Finished) -> Finished:
    """`command=solve` without a bound."""
    return launch(place(), *tiny, *FIXED, "command=solve").succeeded()


@pytest.fixture(scope="session")
def schedule(solved: Finished) -> Path:
    """The schedule that was solved for."""
    return solved.output_dir / "schedule.yaml"


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, schedule: Path) -> dict[str, Path]:
    """Files with something wrong, by name; `{name}` in an override is the path."""
    directory = tmp_path_factory.mktemp("files")
    texts = {
        "trace_empty.csv": "",
        "trace_corrupt.csv": "ContextTokens,GeneratedTokens\n10,5\n20,many\n",
        "trace_truncated.csv": "ContextTokens,GeneratedTokens\n10,5\n20",
        "trace_columns.csv": "prompt,answer\n10,5\n",
        "prompts_empty.jsonl": "",
        "prompts_corrupt.jsonl": '{"prompt": "Hello"}\n{"prompt": "tru',
        "prompts_blank.jsonl": '{"prompt": ""}\n{"prompt": "  "}\n',
        "prompts_good.jsonl": '{"prompt": "Hello"}\n{"prompt": "World"}\n',
        "schedule_corrupt.yaml": "stages: [\n- {",
        "schedule_empty.yaml": "",
        "profile_corrupt.json": '{"version": 1, "key"',
    }
    for name, text in texts.items():
        (directory / name).write_text(text)
    (directory / "trace_bytes.csv").write_bytes(bytes(range(128, 256)))

    plan = yaml.safe_load(schedule.read_text())
    (directory / "schedule_other.yaml").write_text(yaml.safe_dump({**plan, "model": "opt-125m"}))
    wide = [{**stage, "ranks": [2 * i, 2 * i + 1]} for i, stage in enumerate(plan["stages"])]
    if len(wide) == 1:
        wide[0]["ranks"] = [0, 1, 2, 3]
    (directory / "schedule_wide.yaml").write_text(yaml.safe_dump({**plan, "stages": wide}))
    knobs = {**plan["knobs"], "decode_iterations": 0}
    (directory / "schedule_knob.yaml").write_text(yaml.safe_dump({**plan, "knobs": knobs}))

    (found,) = (Path(os.environ["EXEGPT_CACHE"]) / "profiles").glob("tiny-*.json")
    table = json.loads(found.read_text())
    for key, value in (("device", "Abacus"), ("shape", "0" * 12), ("dtype", "bfloat16")):
        changed = {**table, "key": {**table["key"], key: value}}
        if key == "shape":
            changed["key"]["model"] = "huge"
        (directory / f"profile_{key}.json").write_text(json.dumps(changed))

    weights_file = (model_dir / "model.safetensors").read_bytes()
    for name, content in (("cut", weights_file[:-100]), ("stub", weights_file[:4])):
        (directory / f"weights_{name}").mkdir()
        (directory / f"weights_{name}" / "model.safetensors").write_bytes(content)
    (directory / "weights_none").mkdir()
    (directory / "longer").mkdir()
    (directory / "longer" / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))
    write_gguf(directory / "whole.gguf")
    (directory / "weights_cut.gguf").write_bytes((directory / "whole.gguf").read_bytes()[:-100])
    (directory / "sweep_empty").mkdir()
    return {path.name.replace(".", "_"): path for path in directory.iterdir()}
