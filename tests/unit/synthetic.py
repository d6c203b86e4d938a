"""A profile made of formulas, and small models, for the planner's tests."""

from dataclasses import replace

import numpy as np

from exegpt.profiler.grid import make_grid
from exegpt.profiler.table import LayerCosts, ProfileKey, ProfileTable, shape_digest
from exegpt.specs import ClusterSpec, ModelFamily, ModelSpec

TOKENS = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536], dtype=float)
QUERIES = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], dtype=float)
LENGTHS = np.array([16, 64, 256, 1024], dtype=float)
CONTEXTS = np.array([64, 256, 1024, 4096, 16384, 65536, 262144], dtype=float)
BYTES = np.array([2.0**10, 2.0**20, 2.0**30])


def tiny_model(num_layers=8, **changes):
    fields = {
        "name": "tiny",
        "family": ModelFamily.LLAMA,
        "num_hidden_layers": num_layers,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 2048,
    }
    return ModelSpec(**{**fields, **changes})


def layer_costs(tp_size=1, *, linear_s=2e-4, head_s=1e-3, overhead_s=1e-4):
    """Costs with a fixed part and a part that grows, as measured ones have."""
    speed = 1 / tp_size

    def grid(name, axes, names, function):
        mesh = np.meshgrid(*axes, indexing="ij")
        return make_grid(f"tp{tp_size}.{name}", names, axes, function(*mesh))

    return LayerCosts(
        linear=grid("linear", [TOKENS], ("tokens",), lambda n: speed * linear_s * np.maximum(1, n / 32)),
        encode_attention=grid(
            "encode_attention",
            [np.array([1.0, 4.0]), LENGTHS],
            ("queries", "length_tokens"),
            lambda q, n: speed * 1e-8 * q * n**2,
        ),
        decode_attention=grid(
            "decode_attention",
            [QUERIES, CONTEXTS],
            ("queries", "context_tokens"),
            lambda q, n: speed * (1e-6 * q + 1e-7 * n),
        ),
        head=grid("head", [QUERIES], ("queries",), lambda q: speed * head_s * np.maximum(1, q / 32)),
        embed=grid("embed", [TOKENS], ("tokens",), lambda n: 1e-7 * n),
        encode_overhead=grid("encode_overhead", [QUERIES], ("queries",), lambda q: overhead_s + 0 * q),
        decode_overhead=grid("decode_overhead", [QUERIES], ("queries",), lambda q: overhead_s + 0 * q),
        all_reduce=None
        if tp_size == 1
        else grid("all_reduce", [BYTES], ("bytes",), lambda b: 2e-5 + b / 1e9),
    )


def tiny_profile(model, *, tp_sizes=(1, 2), num_ranks=2, **changes):
    return ProfileTable(
        key=ProfileKey(
            model=model.name,
            shape=shape_digest(model),
            dtype="float32",
            device="test",
            num_ranks=num_ranks,
            software="test",
        ),
        layers={t: layer_costs(t, **changes) for t in tp_sizes},
        send=make_grid("send", ("bytes",), [BYTES], 1e-5 + BYTES / 1e10),
        measured_s=0.0,
    )


def tiny_cluster(num_gpus=2, memory_bytes=2 * 2**30):
    return ClusterSpec(
        name="test", num_nodes=1, gpus_per_node=num_gpus, memory_bytes=memory_bytes, device="test"
    )


def constant_profile(model, encode_s, decode_s):
    """One rank; an encode phase takes `encode_s`, an iteration `decode_s`, whatever their size."""
    zero = {
        "linear": ([TOKENS], ("tokens",)),
        "encode_attention": ([np.array([1.0, 4.0]), LENGTHS], ("queries", "length_tokens")),
        "decode_attention": ([QUERIES, CONTEXTS], ("queries", "context_tokens")),
        "head": ([QUERIES], ("queries",)),
        "embed": ([TOKENS], ("tokens",)),
    }
    grids = {
        name: make_grid(name, names, axes, np.zeros([len(a) for a in axes]))
        for name, (axes, names) in zero.items()
    }
    for name, seconds in (("encode_overhead", encode_s), ("decode_overhead", decode_s)):
        grids[name] = make_grid(name, ("queries",), [QUERIES], np.full(len(QUERIES), seconds))
    return replace(tiny_profile(model, tp_sizes=(1,), num_ranks=1), layers={1: LayerCosts(**grids)})


def wild_profile(model, rng, *, num_ranks=2):
    """Isotone and nothing else: cliffs of random height at random places, flat in between."""

    def rising(shape):
        steps = rng.exponential(size=shape) * (rng.random(shape) < 0.5) * 10.0 ** rng.uniform(-5, -2)
        for axis in range(len(shape)):
            steps = np.cumsum(steps, axis=axis)
        return steps + 1e-6

    def grid(name, names, *axes):
        return make_grid(name, names, axes, rising(tuple(len(a) for a in axes)))

    layers = {}
    for tp_size in (1, 2):
        layers[tp_size] = LayerCosts(
            linear=grid("linear", ("tokens",), TOKENS),
            encode_attention=grid(
                "encode_attention", ("queries", "length_tokens"), np.array([1.0, 4.0]), LENGTHS
            ),
            decode_attention=grid("decode_attention", ("queries", "context_tokens"), QUERIES, CONTEXTS),
            head=grid("head", ("queries",), QUERIES),
            embed=grid("embed", ("tokens",), TOKENS),
            encode_overhead=grid("encode_overhead", ("queries",), QUERIES),
            decode_overhead=grid("decode_overhead", ("queries",), QUERIES),
            all_reduce=grid("all_reduce", ("bytes",), BYTES) if tp_size > 1 else None,
        )
    return replace(tiny_profile(model, num_ranks=num_ranks), layers=layers)
