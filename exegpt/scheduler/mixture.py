"""Independent groups of GPUs of different sizes that together hold a rate.

A schedule's replicas are all alike. Where that wastes GPUs (a rate between what two and what four hold),
groups of different sizes, each with a schedule of its own and its share of the requests, may do with fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

# What is held, and the sizes of the groups that hold it.
Split = tuple[float, tuple[int, ...]]


def fewest_by_groups(
    rates_per_s: Mapping[int, float], gpus_per_node: int, num_nodes: int, rate_per_s: float
) -> tuple[int, ...] | None:
    """Sizes of the independent groups that hold a rate with the fewest GPUs, the greatest first.

    Parameters
    ----------
    rates_per_s : mapping of int to float
        What a group of so many GPUs holds: parts of a node, or whole nodes. Other sizes are not used.
    gpus_per_node, num_nodes : int
        What groups are packed into: parts inside one node, whole nodes side by side.
    rate_per_s : float

    Returns
    -------
    tuple of int or None
        None if all of the cluster does not hold the rate. Of equally many GPUs those that hold most.

    Notes
    -----
    Exact: `node(n)` is the most that n GPUs of one node hold over all their partitions, and `nodes(k, n)`
    the most that n GPUs of at most k nodes do, of which the last is partitioned or in a group of whole nodes.
    """
    parts = [n for n in rates_per_s if n <= gpus_per_node]
    blocks = [n // gpus_per_node for n in rates_per_s if n > gpus_per_node]

    def with_group(split: Split, size: int) -> Split:
        return split[0] + rates_per_s[size], (*split[1], size)

    @cache
    def node(n: int) -> Split:
        return max(((0.0, ()), *(with_group(node(n - part), part) for part in parts if part <= n)))

    @cache
    def nodes(k: int, n: int) -> Split:
        if k == 0 or n == 0:
            return 0.0, ()
        found: list[Split] = []
        for inside in range(min(gpus_per_node, n) + 1):
            rest, own = nodes(k - 1, n - inside), node(inside)
            found.append((rest[0] + own[0], (*rest[1], *own[1])))
        for block in blocks:
            if block <= k and block * gpus_per_node <= n:
                size = block * gpus_per_node
                found.append(with_group(nodes(k - block, n - size), size))
        return max(found)

    for n in range(1, gpus_per_node * num_nodes + 1):
        held, groups = nodes(num_nodes, n)
        if held >= rate_per_s:
            return tuple(sorted(groups, reverse=True))
    return None
