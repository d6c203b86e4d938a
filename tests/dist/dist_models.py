"""Small random checkpoints, requests to them, and what transformers answers to one request at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from exegpt.hf_config import read_hf_config
from exegpt.runner.weights.gguf_config import gguf_model_spec
from exegpt.specs import ModelSpec
from exegpt.workload.requests import Request

# Logits of size 1 to 10 in float32, summed in another order: see TOLERANCE of the models' tests.
# An answer whose best two logits are this far apart is the same on every machine and layout.
MARGIN = 1e-3
WINDOW = 384
# Ids below carry no meaning; two of them are padding and start in some of the families.
FIRST_TOKEN = 3

# One token to some hundred, both sides of page edges; outputs of one token among them.
PROMPT_LENS = (1, 7, 33, 300, 16, 2, 64, 15, 48, 5, 1, 29, 130, 17)
OUTPUT_LENS = (12, 1, 25, 6, 40, 3, 9, 18, 1, 30, 7, 22, 5, 16)
# Those that fit small page pools.
SHORT_IDS = tuple(i for i, length in enumerate(PROMPT_LENS) if length <= 64)

COMMON: dict[str, Any] = {
    "num_hidden_layers": 3,
    "vocab_size": 151,
    "max_position_embeddings": WINDOW,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Tokens are drawn from seeds that keep MARGIN; the oracle's test checks it.
SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    # Heads of SmolLM2-135M: 9, sharing 3 K/V heads, embeddings tied.
    "smollm2": (
        "llama",
        4,
        {
            "hidden_size": 144,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 192,
            "tie_word_embeddings": True,
        },
    ),
    "llama": (
        "llama",
        6,
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "tie_word_embeddings": False,
        },
    ),
    "opt": (
        "opt",
        6,
        {
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "num_attention_heads": 4,
            "ffn_dim": 128,
            "dropout": 0.0,
            "tie_word_embeddings": True,
        },
    ),
}


def greedy(model: Any, request: Request, eos_token_ids: frozenset[int]) -> tuple[list[int], float]:
    """transformers' greedy answer to a request alone, and the least distance of its best two logits."""
    prompt = torch.tensor([request.token_ids])
    stops = sorted(eos_token_ids) if request.forced_output_tokens is None else None
    full = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=request.forced_output_tokens or request.max_output_tokens,
        do_sample=False,
        eos_token_id=stops or None,
        pad_token_id=1,
    )
    with torch.inference_mode():
        logits = model(full[:, :-1]).logits[0, prompt.shape[1] - 1 :]
    best = logits.topk(2).values
    return full[0, prompt.shape[1] :].tolist(), float((best[:, 0] - best[:, 1]).min())


@dataclass
class Oracle:
    """A checkpoint with requests and the answers to them.

    Every other request has a forced length; the rest end at `eos_token_ids` or their limit.
    """

    path: str
    spec: ModelSpec
    model: Any
    requests: tuple[Request, ...]
    eos_token_ids: frozenset[int]

    @cached_property
    def _answered(self) -> list[tuple[list[int], float]]:
        return [greedy(self.model, request, self.eos_token_ids) for request in self.requests]

    @property
    def answers(self) -> dict[int, list[int]]:
        """Output tokens by request."""
        return {
            request.id: tokens for request, (tokens, _) in zip(self.requests, self._answered, strict=True)
        }

    @property
    def margin(self) -> float:
        """Least distance of the best two logits over all answers."""
        return min(margin for _, margin in self._answered)


def make_requests(
    vocab_size: int,
    seed: int,
    prompt_lens: Sequence[int] = PROMPT_LENS,
    output_lens: Sequence[int] = OUTPUT_LENS,
) -> tuple[Request, ...]:
    """Requests of these lengths, tokens drawn from `seed`; those of even id have forced lengths."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        Request(
            id=i,
            token_ids=tuple(torch.randint(FIRST_TOKEN, vocab_size, (length,), generator=generator).tolist()),
            input_tokens=length,
            max_output_tokens=limit,
            forced_output_tokens=limit if i % 2 == 0 else None,
        )
        for i, (length, limit) in enumerate(zip(prompt_lens, output_lens, strict=True))
    )


def spoiled_requests(vocab_size: int) -> tuple[tuple[Request, str], ...]:
    """Requests that cannot be served, each with what must be said of it; the third needs 23 pages of 16."""
    asked: dict[str, dict[str, Any]] = {
        "the prompt is empty": {"token_ids": ()},
        f"400 input .* window of {WINDOW} tokens": {"token_ids": (5,) * 400},
        "need 23 K/V pages of 16 tokens, but there are": {"token_ids": (5,) * 350, "max_output_tokens": 10},
        "380 input and up to 10 output": {"token_ids": (5,) * 380, "max_output_tokens": 10},
        f"token id {vocab_size} is outside": {"token_ids": (5, vocab_size, 5)},
        "token id -1 is outside": {"token_ids": (-1,)},
        "no such line": {"token_ids": (5,), "error": "no such line"},
        "max_output_tokens=0 must be at least 1": {"token_ids": (5,), "max_output_tokens": 0},
    }
    return tuple(
        (
            Request(**{"id": i, "input_tokens": len(fields["token_ids"]), "max_output_tokens": 4, **fields}),
            said,
        )
        for i, (said, fields) in enumerate(asked.items(), start=len(PROMPT_LENS))
    )


def choose_eos(model: Any, requests: tuple[Request, ...]) -> frozenset[int]:
    """Two tokens that end several answers on their way: those in most of what the model says without."""
    endless = [replace(r, forced_output_tokens=r.max_output_tokens) for r in requests]
    said = Counter(token for r in endless for token in set(greedy(model, r, frozenset())[0][1:-1]))
    return frozenset(token for token, _ in said.most_common(2))


def make_oracle(name: str, directory: Path) -> Oracle:
    """Write the random checkpoint `name` of SHAPES with transformers and make its requests."""
    from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

    family, seed, shape = SHAPES[name]
    config, kind = (LlamaConfig, LlamaForCausalLM) if family == "llama" else (OPTConfig, OPTForCausalLM)
    model = kind(config(**COMMON, **shape)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Biases and norms are random too, and outputs vary.
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(noise + 1 if "norm" in key and key.endswith("weight") else noise)
    model.save_pretrained(directory)
    requests = make_requests(COMMON["vocab_size"], seed)
    return Oracle(
        str(directory),
        read_hf_config(directory, name=name),
        model,
        requests,
        choose_eos(model, requests),
    )


def open_smollm2(gguf: Path) -> Oracle:
    """SmolLM2-135M-Instruct from its GGUF file, in float32, with fewer and shorter requests."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    spec = gguf_model_spec(gguf, "smollm2-135m")
    requests = make_requests(spec.vocab_size, 4, (1, 40, 9, 120, 16, 3), (8, 5, 12, 1, 10, 6))
    return Oracle(str(gguf), spec, model.eval(), requests, choose_eos(model, requests))
