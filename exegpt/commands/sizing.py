"""`command=solve solver.rate_per_s=R`: how many GPUs of the cluster's kind a rate needs."""

from __future__ import annotations

from dataclasses import replace

from exegpt.commands.context import Context
from exegpt.commands.profile import chosen_source, load_profile
from exegpt.errors import ConfigError
from exegpt.runner.progress import step_progress
from exegpt.scheduler.problem import Problem
from exegpt.scheduler.sizing import Sizing, find_sizing
from exegpt.scheduler.solve import resolve_bound
from exegpt.settings import ProfileSource
from exegpt.specs import ClusterSpec

QUEUE_NOTE = (
    "latencies count from the start of encoding; waiting for it comes on top, the more the less headroom: "
    "command=simulate workload.arrival=poisson shows it"
)


def size_note(cluster: ClusterSpec) -> str:
    """How to ask other commands for the size that was chosen."""
    return (
        f"schedule.yaml is for cluster.num_nodes={cluster.num_nodes} "
        f"cluster.gpus_per_node={cluster.gpus_per_node}"
    )


def size_cluster(context: Context, problem: Problem) -> Sizing:
    """The fewest GPUs that hold the job's rate; every size is planned with a profile of its own.

    A bound taken from the static baseline is that of the whole cluster, in seconds, for all sizes.

    Raises
    ------
    ConfigError
        If costs would have to be measured, or a range asked for is impossible on the cluster.
    CapacityError
        If the bound is to be taken from the static baseline, which fits nowhere.
    """
    rate_per_s = context.job.solver.rate_per_s
    assert rate_per_s is not None
    if chosen_source(context) is ProfileSource.measured:
        raise ConfigError(
            f"solver.rate_per_s={rate_per_s:g}: a measured profile holds for its own number of ranks, so "
            "other sizes cannot be planned with it; name the GPU's sheet by cluster (cluster=h100-8) or "
            "cluster.gpu, with profile.source=analytic"
        )
    problem.check_ranges()
    fixed = replace(problem, bound=resolve_bound(problem), bound_quantile=None)

    def problem_of(cluster: ClusterSpec) -> Problem:
        if cluster.num_gpus == problem.cluster.num_gpus:
            return fixed
        settings = replace(
            context.job.cluster, num_nodes=cluster.num_nodes, gpus_per_node=cluster.gpus_per_node
        )
        sized = replace(context, job=replace(context.job, cluster=settings))
        return replace(fixed, cluster=cluster, profile=load_profile(sized)[0])

    with step_progress("sizes") as report:
        return find_sizing(problem_of, problem.cluster, rate_per_s, report=report)
