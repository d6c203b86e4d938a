"""What an answer costs, where a GPU's price is known: money in the currency of that price."""

from __future__ import annotations

from exegpt.specs import ClusterSpec
from exegpt.workload.lengths import RequestLengths

_HOUR_S = 3600
_MILLION = 1_000_000


def cost_per_hour(cluster: ClusterSpec) -> float | None:
    """Price of all GPUs of a cluster for an hour; None if a GPU's is not given."""
    price = cluster.price_per_gpu_hour
    return None if price is None else price * cluster.num_gpus


def token_costs(cluster: ClusterSpec, lengths: RequestLengths, throughput_per_s: float) -> dict[str, float]:
    """Cost of a million tokens at a throughput in sequences per second, by its name in result.json.

    `cost_per_million_output_tokens` lays all costs on the output; `cost_per_million_tokens` on input and
    output tokens alike. Empty without a price.
    """
    hour = cost_per_hour(cluster)
    if hour is None:
        return {}
    request = hour / (_HOUR_S * throughput_per_s)
    return {
        "cost_per_million_output_tokens": _MILLION * request / lengths.mean_output,
        "cost_per_million_tokens": _MILLION * request / (lengths.mean_input + lengths.mean_output),
    }
