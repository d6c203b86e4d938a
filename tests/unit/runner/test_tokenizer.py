"""Prompts to tokens: against transformers' templates, from directories and from GGUF metadata."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from exegpt.errors import WeightsError
from exegpt.runner.tokenizer import PromptTokenizer, load_tokenizer
from exegpt.runner.weights import WeightsLocation

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }} {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)
# The third is one that transformers adds to every byte-level BPE it converts from GGUF.
SPECIAL = ["<|start|>", "<|end|>", "<|endoftext|>"]
PROMPTS = ["the cat sat", "a cat", "on <|end|> the mat"]


def byte_tokens() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return SPECIAL + sorted(ByteLevel.alphabet()) + ["th", "the", "at"]


MERGES = [("t", "h"), ("th", "e"), ("a", "t")]


def save_tokenizer(directory: Path, template: str | None = TEMPLATE) -> Any:
    """A byte-level BPE of 262 tokens, saved as transformers saves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(byte_tokens())}
    inner = Tokenizer(models.BPE(vocabulary, MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<|start|>", eos_token="<|end|>")
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return tokenizer


def write_gguf(path: Path, eot: int | None = None, with_tokenizer: bool = True) -> Path:
    """The same tokenizer as GGUF metadata, with one tensor so that the file is whole."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    if with_tokenizer:
        tokens = byte_tokens()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in MERGES])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template(TEMPLATE)
        if eot is not None:
            writer.add_eot_token_id(eot)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError(f"a local tokenizer asked the network: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def load_directory(directory: Path) -> PromptTokenizer | None:
    return load_tokenizer(WeightsLocation("safetensors", directory, directory), cache_dir=directory / "cache")


def templated(tokenizer: Any) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        for prompt in PROMPTS
    ]


@pytest.mark.usefixtures("no_network")
def test_a_directory_gives_the_ids_of_its_template(tmp_path: Path) -> None:
    oracle = save_tokenizer(tmp_path)
    tokenizer = load_directory(tmp_path)
    assert tokenizer is not None
    ids = tokenizer.encode_chat(PROMPTS)
    assert ids == templated(oracle)
    # By hand: the template's text, its two special tokens as one id each.
    assert ids[1] == oracle("<|start|>user a cat<|end|><|start|>assistant ")["input_ids"]
    assert ids[1].count(0) == 2
    assert tokenizer.vocab_size == 262
    assert tokenizer.eos_token_ids == {1}
    assert tokenizer.encode(["the cat"]) == [oracle("the cat")["input_ids"]]
    assert tokenizer.decode(tokenizer.encode(["the cat sat, 12 ünï"])[0]) == "the cat sat, 12 ünï"
    assert tokenizer.decode(ids[1]) == "user a catassistant "
    assert tokenizer.encode_chat([]) == tokenizer.encode([]) == []


def test_without_a_template_prompts_are_encoded_plainly(tmp_path: Path) -> None:
    oracle = save_tokenizer(tmp_path, template=None)
    tokenizer = load_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode_chat(PROMPTS) == [oracle(prompt)["input_ids"] for prompt in PROMPTS]


@pytest.mark.parametrize(("value", "expected"), [(7, {1, 7}), ([7, 8], {1, 7, 8}), (None, {1})])
def test_ends_come_from_generation_config_too(tmp_path: Path, value: Any, expected: set[int]) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    tokenizer = load_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.eos_token_ids == expected


@pytest.mark.usefixtures("no_network")
def test_gguf_metadata_give_the_same_tokenizer_and_are_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    oracle = save_tokenizer(tmp_path / "oracle")
    file = write_gguf(tmp_path / "tiny.gguf", eot=5)
    location, cache = WeightsLocation("gguf", file, tmp_path), tmp_path / "cache"
    first = load_tokenizer(location, cache_dir=cache)
    assert first is not None
    assert first.encode_chat(PROMPTS) == templated(oracle)
    assert first.eos_token_ids == {1, 5}
    assert first.vocab_size == 262
    assert len(list((cache / "tokenizers").iterdir())) == 1

    plain = AutoTokenizer.from_pretrained

    def from_cache(path: str, **options: Any) -> Any:
        assert "gguf_file" not in options, "converted again"
        return plain(path, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_cache)
    second = load_tokenizer(location, cache_dir=cache)
    assert second is not None
    assert second.encode_chat(PROMPTS) == first.encode_chat(PROMPTS)
    assert second.eos_token_ids == first.eos_token_ids
    assert second.decode(second.encode(["the cat sat"])[0]) == "the cat sat"


def test_no_tokenizer_is_none(tmp_path: Path) -> None:
    assert load_tokenizer(WeightsLocation("random"), cache_dir=tmp_path) is None
    assert load_directory(tmp_path) is None
    file = write_gguf(tmp_path / "bare.gguf", with_tokenizer=False)
    assert load_tokenizer(WeightsLocation("gguf", file, tmp_path), cache_dir=tmp_path) is None


def test_random_weights_may_have_a_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(WeightsLocation("random", None, tmp_path), cache_dir=tmp_path)
    assert tokenizer is not None
    assert tokenizer.vocab_size == 262


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_corrupt_files_are_one_message(tmp_path: Path, file: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / file).write_text('{"model": ')
    with pytest.raises(WeightsError, match=str(tmp_path)):
        load_directory(tmp_path)


def test_ends_that_are_no_ids_and_templates_that_fail_are_named(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template="{{ raise_exception('system turn needed') }}")
    tokenizer = load_directory(tmp_path)
    assert tokenizer is not None
    with pytest.raises(WeightsError, match="chat template fails on a user's turn: system turn needed"):
        tokenizer.encode_chat(["hello"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(WeightsError, match=r"generation_config\.json: eos_token_id='</s>' must be"):
        load_directory(tmp_path)
