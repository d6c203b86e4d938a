"""Prompts to tokens and back, with the tokenizer that lies beside the weights."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging import ERROR
from pathlib import Path
from typing import Any

from exegpt.errors import WeightsError
from exegpt.runner.weights.gguf_header import GgufHeader, read_gguf_header
from exegpt.runner.weights.location import WeightsLocation

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# The keys that llama.cpp counts as ends of a generation.
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class PromptTokenizer:
    """A model's tokenizer with its chat template and the tokens that end its answers.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        Already loaded; see `load_tokenizer`.
    source : str
        Where it came from, for messages.
    eos_token_ids : frozenset of int
        Tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, *, source: str, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self.eos_token_ids = eos_token_ids

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer, added ones included; a model's matrices may be padded beyond."""
        return len(self._tokenizer)

    def encode_chat(self, prompts: Sequence[str]) -> list[list[int]]:
        """Tokens of each prompt as a user's turn, up to where the model's answer starts.

        Without a chat template the prompts are encoded as they are, with special tokens.

        Raises
        ------
        WeightsError
            If the template fails on a single user's turn.
        """
        if not self._tokenizer.chat_template:
            return self.encode(prompts)
        from jinja2 import TemplateError

        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        try:
            return [
                self._tokenizer.apply_chat_template(
                    turn, tokenize=True, add_generation_prompt=True, return_dict=False
                )
                for turn in turns
            ]
        except TemplateError as error:
            raise WeightsError(
                f"{self._source}: the chat template fails on a user's turn: {error}"
            ) from error

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text as it is, with the special tokens that the tokenizer adds."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(list(texts))["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the tokens, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def load_tokenizer(location: WeightsLocation, *, cache_dir: Path) -> PromptTokenizer | None:
    """Load the tokenizer that belongs to the weights; touches no network.

    Parameters
    ----------
    location : WeightsLocation
        From `resolve_weights`. Random weights have a tokenizer if a `directory` is named.
    cache_dir : Path
        Where tokenizers converted from GGUF metadata are kept: converting takes seconds.

    Returns
    -------
    PromptTokenizer or None
        None if there is no tokenizer beside the weights.

    Raises
    ------
    WeightsError
        If there is one and it cannot be read.
    """
    if location.kind == "gguf" and location.path is not None:
        header = read_gguf_header(location.path)
        if "tokenizer.ggml.model" not in header.metadata:
            return None
        tokenizer = _gguf_tokenizer(header, cache_dir)
        metadata = {key: header.metadata.get(f"tokenizer.ggml.{key}") for key in _GGUF_EOS_KEYS}
        eos = frozenset(value for value in metadata.values() if isinstance(value, int))
        source = location.path
    elif location.directory is not None and any((location.directory / file).exists() for file in _FILES):
        source = location.directory
        tokenizer = _load(source)
        eos = _eos_of(source / "generation_config.json") | _eos_of(source / "config.json")
    else:
        return None
    if tokenizer.eos_token_id is not None:
        eos |= {tokenizer.eos_token_id}
    return PromptTokenizer(tokenizer, source=str(source), eos_token_ids=eos)


def _gguf_tokenizer(header: GgufHeader, cache_dir: Path) -> Any:
    """The tokenizer in a GGUF file's metadata, converted once for each header."""
    with header.path.open("rb") as file:
        digest = hashlib.sha256(file.read(header.num_bytes)).hexdigest()[:32]
    target = cache_dir / "tokenizers" / digest
    if target.exists():
        return _load(target)
    tokenizer = _load(header.path.parent, gguf_file=header.path.name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{digest}-", dir=target.parent))
        try:
            tokenizer.save_pretrained(scratch)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        # Another rank's rename may have come first; any other failure to store is the user's.
        if not target.exists():
            raise WeightsError(f"{target}: the tokenizer cannot be stored: {error}") from error
    return tokenizer


def _load(directory: Path, gguf_file: str | None = None) -> Any:
    from transformers import AutoTokenizer

    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False, **options
            )
    # The tokenizers library raises bare Exception for a corrupt tokenizer.json.
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise WeightsError(
            f"{directory / (gguf_file or '')}: the tokenizer cannot be read "
            f"({type(error).__name__}: {reason}); download it again, or remove its files to run on token ids"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' notes (no model class found, special tokens added) off the terminal."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _eos_of(path: Path) -> frozenset[int]:
    """`eos_token_id` of a Hugging Face JSON file, one or a list; empty if file or key is absent."""
    if not path.exists():
        return frozenset()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path}: not JSON, corrupt or truncated: {error}") from error
    value = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = value if isinstance(value, list) else [value]
    if value is not None and not all(type(item) is int for item in ids):
        raise WeightsError(f"{path}: eos_token_id={value!r} must be a token id or a list of them")
    return frozenset(item for item in ids if item is not None)
