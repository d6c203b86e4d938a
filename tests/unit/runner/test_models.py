"""Stages against transformers' own modelling code, on small random models in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from lockstep import LockstepGroup
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from exegpt.errors import ConfigError, LaunchError, WeightsError
from exegpt.runner.kv_cache import BatchRows, KVCache, PageAllocator
from exegpt.runner.models import StageModel, TensorParallel
from exegpt.specs import ModelFamily, ModelSpec, RopeScaling

PAGE_SIZE = 4
# Same sums in another order, float32, logits of size 1 to 10.
TOLERANCE = 1e-4

# 97 ids: split over two ranks, the last has one less.
LLAMA = ModelSpec(
    name="small-llama",
    family=ModelFamily.LLAMA,
    num_hidden_layers=3,
    hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=80,
    vocab_size=97,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
LLAMA3_ROPE = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
SPECS = {
    "llama-untied": LLAMA,
    "llama-tied-llama3": replace(LLAMA, tie_word_embeddings=True, rope_scaling=LLAMA3_ROPE, rope_theta=500.0),
    "llama-linear-biases": replace(
        LLAMA,
        rope_scaling=RopeScaling(rope_type="linear", factor=4.0),
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
    ),
    "qwen2": replace(LLAMA, head_dim=12, attention_bias=True, norm_eps=1e-6, rope_theta=1e6),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=24, norm_eps=1e-6),
    "opt": ModelSpec(
        name="small-opt",
        family=ModelFamily.OPT,
        num_hidden_layers=3,
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=12,
        intermediate_size=80,
        vocab_size=97,
        max_position_embeddings=128,
        hidden_act="relu",
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
    ),
}
CASES = list(SPECS)


def _hf_config(name: str) -> Any:
    spec = SPECS[name]
    common: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "pad_token_id": 1,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if name == "opt":
        return OPTConfig(**common, ffn_dim=80, word_embed_proj_dim=48, dropout=0.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if name == "llama-tied-llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    if name == "llama-linear-biases":
        rope |= {"rope_type": "linear", "factor": 4.0}
        common |= {"attention_bias": True, "mlp_bias": True}
    kind = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}.get(name, LlamaConfig)
    if name != "qwen2":
        common["head_dim"] = spec.head_dim
    return kind(
        **common,
        num_key_value_heads=2,
        intermediate_size=80,
        rms_norm_eps=spec.norm_eps,
        rope_parameters=rope,
    )


@cache
def oracle(name: str) -> Any:
    """transformers' model with weights that make outputs vary: biases and norms are random too."""
    kinds = {"qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM, "opt": OPTForCausalLM}
    model = kinds.get(name, LlamaForCausalLM)(_hf_config(name)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(noise + 1 if "norm" in key and key.endswith("weight") else noise)
    return model


class StateDictWeights:
    """Weights of a transformers model, with a log of what was read."""

    source = "state dict"

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state
        self.num_read: dict[str, int] = {}

    def names(self) -> frozenset[str]:
        return frozenset(self.state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.state[name].shape)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        part = self.state[name][rows or slice(None)]
        part = part if columns is None else part[:, columns]
        self.num_read[name] = self.num_read.get(name, 0) + part.numel()
        return part.clone()


def load_stages(
    name: str,
    cuts: Sequence[int] = (0, 3),
    tp: TensorParallel | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[StageModel]:
    """Stages between the layers `cuts`, with the oracle's weights."""
    group = tp or TensorParallel.single()
    stages = []
    for layers in pairwise(cuts):
        stage = StageModel(SPECS[name], layers, group, dtype=dtype, device="cpu")
        stage.load(StateDictWeights(oracle(name).state_dict()))
        stages.append(stage)
    return stages


def new_cache(stage: StageModel, num_pages: int = 60) -> KVCache:
    cache = KVCache(
        stage.num_layers, num_pages, PAGE_SIZE, stage.num_kv_heads, stage.model.head_dim, stage.dtype, "cpu"
    )
    for pages in (*cache.k, *cache.v):
        pages.fill_(float("nan"))
    return cache


def new_rows(kv: KVCache) -> BatchRows:
    return BatchRows(PageAllocator(kv.num_pages, kv.page_size), capacity=4, max_pages=12)


@dataclass
class Served:
    """Tokens and the logits they were chosen from, by request."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]


# Request 1 leaves when 3 and 4 join; lengths before, on and after page edges; 0 crosses llama3's window.
PROMPT_LENS = (38, 5, 1, 8, 3)
OUTPUT_LENS = (9, 3, 7, 1, 6)
JOINS = {0: (0, 1, 2), 2: (3, 4)}


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(2, 97, (length,), generator=generator) for length in PROMPT_LENS]


def serve(stages: Sequence[StageModel]) -> Served:
    """Greedy serving with rows that join and leave; `stages` are one rank of each."""
    caches = [new_cache(stage) for stage in stages]
    allocators = [PageAllocator(kv.num_pages, kv.page_size) for kv in caches]
    rows = [BatchRows(allocator, capacity=4, max_pages=12) for allocator in allocators]
    asked = prompts()
    tokens: list[list[int]] = [[] for _ in asked]
    logits: list[list[torch.Tensor]] = [[] for _ in asked]

    def take(ids: Sequence[int], hidden: torch.Tensor) -> None:
        last = stages[-1]
        shard, first_id = last.head(hidden)
        assert first_id == last.tp.rank * shard.shape[1]
        full = torch.cat(last.tp.all_gather(shard), dim=-1)
        assert bool((full[:, 97:] == -torch.inf).all())
        for request, row in zip(ids, full[:, :97], strict=True):
            logits[request].append(row)
            tokens[request].append(int(row.argmax()))
        unfinished = np.array([len(tokens[i]) < OUTPUT_LENS[i] for i in rows[0].row_ids.tolist()], dtype=bool)
        for stage_rows in rows:
            stage_rows.keep(unfinished)

    for iteration in range(12):
        if new := JOINS.get(iteration, ()):
            lengths = [PROMPT_LENS[i] for i in new]
            hidden = None
            for stage, kv, stage_rows in zip(stages, caches, rows, strict=True):
                inputs = stage_rows.add(new, lengths)
                if hidden is None:
                    hidden = stage.embed(torch.cat([asked[i] for i in new]), inputs.positions)
                hidden = stage.encode(hidden, inputs.positions, lengths, kv, inputs.slots)
            assert hidden is not None
            take(new, hidden[torch.tensor(lengths).cumsum(0) - 1])
        if not len(rows[0]):
            continue
        hidden = None
        for stage, kv, stage_rows in zip(stages, caches, rows, strict=True):
            stage_rows.advance()
            if hidden is None:
                newest = torch.tensor([tokens[i][-1] for i in stage_rows.row_ids.tolist()])
                hidden = stage.embed(newest, stage_rows.positions)
            hidden = stage.decode(
                hidden,
                stage_rows.positions,
                kv,
                stage_rows.page_table,
                stage_rows.context_lens,
                stage_rows.slots,
            )
        assert hidden is not None
        take(rows[0].row_ids.tolist(), hidden)
    for allocator in allocators:
        allocator.check()
        assert allocator.num_free == allocator.num_pages
    return Served(tokens, [torch.stack(of_request) for of_request in logits])


@cache
def served_alone(name: str) -> Served:
    """The same by transformers, one request at a time: `generate`, and logits of the whole sequence."""
    model = oracle(name)
    tokens, logits = [], []
    for prompt, num_tokens in zip(prompts(), OUTPUT_LENS, strict=True):
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        full = model.generate(prompt[None], attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)[
            0
        ]
        tokens.append(full[len(prompt) :].tolist())
        with torch.no_grad():
            logits.append(model(full[None, :-1]).logits[0, len(prompt) - 1 :])
    return Served(tokens, logits)


def assert_same(served: Served, expected: Served) -> None:
    assert served.tokens == expected.tokens
    for ours, theirs in zip(served.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_oracle_tells_requests_apart() -> None:
    for name in CASES:
        flat = [token for of_request in served_alone(name).tokens for token in of_request]
        assert len(flat) == sum(OUTPUT_LENS)
        assert len(set(flat)) > 8, f"{name} repeats itself; equal tokens would prove little"


@pytest.mark.parametrize("name", CASES)
def test_ragged_batches_give_what_transformers_gives_alone(name: str) -> None:
    assert_same(serve(load_stages(name)), served_alone(name))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cuts", [(0, 1, 3), (0, 1, 2, 3)])
def test_pipelined_stages_give_the_same(name: str, cuts: tuple[int, ...]) -> None:
    assert_same(serve(load_stages(name, cuts)), served_alone(name))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cuts", [(0, 3), (0, 2, 3)])
def test_tensor_parallel_ranks_give_the_same(name: str, cuts: tuple[int, ...]) -> None:
    results = LockstepGroup(2).run(lambda tp: serve(load_stages(name, cuts, tp)))
    for served in results:
        assert_same(served, served_alone(name))


@pytest.mark.parametrize("name", ["llama-untied", "opt"])
def test_bfloat16_stays_near_float32(name: str) -> None:
    stage = load_stages(name, dtype=torch.bfloat16)[0]
    cache = new_cache(stage)
    inputs = new_rows(cache).add([0], [PROMPT_LENS[0]])
    hidden = stage.embed(prompts()[0], inputs.positions)
    hidden = stage.encode(hidden, inputs.positions, [PROMPT_LENS[0]], cache, inputs.slots)
    logits, _ = stage.head(hidden[-1:])
    expected = served_alone(name).logits[0][:1]
    assert logits.dtype == torch.bfloat16
    # 8 bits of mantissa, some thirty roundings in a row: a few per cent of the logits' spread.
    assert float((logits.float() - expected).abs().max()) < 0.1 * float(expected.std())


def test_every_part_tells_when_it_ends() -> None:
    stage = load_stages("llama-untied")[0]
    kv = new_cache(stage)
    rows = new_rows(kv)
    ended: list[str] = []
    stage.seam = ended.append
    inputs = rows.add([0], [5])
    hidden = stage.embed(prompts()[1], inputs.positions)
    hidden = stage.encode(hidden, inputs.positions, [5], kv, inputs.slots)
    stage.head(hidden[-1:])
    assert ended == ["embed", *["linear", "encode_attention", "linear"] * 3, "head"]
    ended.clear()
    rows.advance()
    stage.decode(hidden[-1:], rows.positions, kv, rows.page_table, rows.context_lens, rows.slots)
    assert ended == ["linear", "decode_attention", "linear"] * 3


@pytest.mark.parametrize("name", CASES)
def test_a_whole_model_holds_each_parameter_once(name: str) -> None:
    stage = load_stages(name)[0]
    assert stage.is_first
    assert stage.is_last
    assert stage.weight_bytes == 4 * sum(p.numel() for p in oracle(name).parameters())


@pytest.mark.parametrize("name", CASES)
def test_stages_together_hold_the_model(name: str) -> None:
    first, middle, last = load_stages(name, (0, 1, 2, 3))
    assert (first.is_first, middle.is_first, last.is_first) == (True, False, False)
    assert (first.is_last, middle.is_last, last.is_last) == (False, False, True)
    spec = SPECS[name]
    assert first.weight_bytes == 4 * (spec.layer_parameters + spec.embedding_parameters)
    assert middle.weight_bytes == 4 * spec.layer_parameters
    # Tied or not: embedding and output matrix are on different ranks here.
    assert last.weight_bytes == 4 * (spec.layer_parameters + spec.head_parameters)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_reads_only_its_slices(name: str) -> None:
    spec = SPECS[name]
    group = LockstepGroup(2)
    readers = [StateDictWeights(oracle(name).state_dict()) for _ in range(2)]
    for rank, reader in enumerate(readers):
        StageModel(spec, (0, 3), group.tensor_parallel(rank), dtype=torch.float32, device="cpu").load(reader)
    row_bias = ("o_proj.bias", "out_proj.bias", "down_proj.bias", "fc2.bias")
    for key, tensor in oracle(name).state_dict().items():
        read = [reader.num_read.get(key, 0) for reader in readers]
        if key == "lm_head.weight" and spec.tie_word_embeddings:
            assert read == [0, 0]
        elif key.endswith(row_bias):
            assert read == [tensor.numel(), 0]
        elif "norm" in key or "embed" in key:
            whole = [tensor.numel()] * 2
            shard = [49 * 48, 48 * 48] if spec.tie_word_embeddings and "embed_tokens" in key else [0, 0]
            assert read == [a + b for a, b in zip(whole, shard, strict=True)]
        elif key == "lm_head.weight":
            assert read == [49 * 48, 48 * 48]
        else:
            assert read == [tensor.numel() // 2] * 2, key


def test_weights_of_another_shape_are_named() -> None:
    state = dict(oracle("llama-untied").state_dict())
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(79, 48)
    stage = StageModel(LLAMA, (0, 3), TensorParallel.single(), dtype=torch.float32, device="cpu")
    with pytest.raises(
        WeightsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight .*\[79, 48\].*\[80, 48\]"
    ):
        stage.load(StateDictWeights(state))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": RopeScaling(rope_type="yarn")}, r"rope_type='yarn'.*'default', 'linear', 'llama3'"),
        ({"head_dim": 15}, r"head_dim=15 .*must be even"),
    ],
)
def test_unsupported_positions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StageModel(
            replace(LLAMA, **change), (0, 3), TensorParallel.single(), dtype=torch.float32, device="cpu"
        )


def test_unknown_activation_is_refused() -> None:
    stage = StageModel(
        replace(LLAMA, hidden_act="swish9"),
        (0, 3),
        TensorParallel.single(),
        dtype=torch.float32,
        device="cpu",
    )
    with pytest.raises(ConfigError, match=r"model\.hidden_act='swish9'.*allowed: .*'silu'"):
        stage.load(StateDictWeights(oracle("llama-untied").state_dict()))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"family": ModelFamily.GPT2}, "family gpt2;"),
        (
            {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16},
            "llama with 4 experts;",
        ),
    ],
)
def test_models_that_can_only_be_planned_are_refused(change: dict[str, Any], kind: str) -> None:
    with pytest.raises(ConfigError, match=f"planning only, .*{kind}"):
        StageModel(
            replace(LLAMA, **change), (0, 3), TensorParallel.single(), dtype=torch.float32, device="cpu"
        )


@pytest.mark.parametrize("layers", [(0, 4), (2, 2), (-1, 2)])
def test_layers_outside_the_model_are_refused(layers: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"stages\[\]\.layers=.*within 0\.\.3"):
        StageModel(LLAMA, layers, TensorParallel.single(), dtype=torch.float32, device="cpu")


def test_a_degree_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp_size=4 .*\[1, 2\]"):
        StageModel(LLAMA, (0, 3), LockstepGroup(4).tensor_parallel(0), dtype=torch.float32, device="cpu")


def test_a_rank_outside_its_group_is_refused() -> None:
    single = TensorParallel.single()
    with pytest.raises(LaunchError, match=r"rank 2 is outside 0\.\.1"):
        TensorParallel(rank=2, size=2, all_reduce=single.all_reduce, all_gather=single.all_gather)
