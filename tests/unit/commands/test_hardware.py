"""Clusters of this machine and of data sheets."""

from __future__ import annotations

from pathlib import Path

import pytest

from exegpt.commands.hardware import (
    CUDA_MEMORY_SHARE,
    Hardware,
    absent_reason,
    catalogued_cluster,
    choose_dtype,
    make_cluster,
)
from exegpt.errors import ConfigError
from exegpt.profiler.sheet import read_sheet, sheet_names, sheet_of_card
from exegpt.settings import ClusterSettings, ProfileSettings, ProfileSource, RunDtype
from exegpt.specs import Dtype

A100 = read_sheet("a100-80")


def a100_cluster(**changes):
    settings = {"name": "a100-16", "num_nodes": 2, "gpus_per_node": 8, "gpu": "a100-80", **changes}
    return ClusterSettings(**settings)


def gpus(name="NVIDIA A100-SXM4-80GB", num_devices=8):
    return Hardware(
        device_type="cuda", name=name, num_devices=num_devices, memory_bytes=72 * 2**30, native_bfloat16=True
    )


def test_a_catalogued_cluster_is_what_its_sheet_says() -> None:
    cluster = catalogued_cluster(a100_cluster(price_per_gpu_hour=1.5), A100)
    assert (cluster.num_gpus, cluster.device, cluster.device_type) == (16, "a100-80", "cuda")
    assert cluster.memory_bytes == int(80 * 2**30 * CUDA_MEMORY_SHARE)
    assert (cluster.price_per_gpu_hour, cluster.is_local) == (1.5, False)
    assert catalogued_cluster(a100_cluster(memory_bytes=2**30), A100).memory_bytes == 2**30


def test_a_cluster_of_this_machine_is_local() -> None:
    cluster = make_cluster(ClusterSettings(name="local", price_per_gpu_hour=2.0), gpus())
    assert (cluster.is_local, cluster.num_gpus, cluster.price_per_gpu_hour) == (True, 8, 2.0)


def test_a_catalogued_cluster_runs_where_the_driver_lists_its_gpus() -> None:
    cluster = catalogued_cluster(a100_cluster(), A100)
    assert absent_reason(cluster, A100, gpus()) is None
    assert "has Xeon, not a100-80" in str(absent_reason(cluster, A100, gpus("Xeon")))
    assert "has 4 of the 8 GPUs of a node" in str(absent_reason(cluster, A100, gpus(num_devices=4)))


def test_cards_are_known_by_the_name_that_the_driver_gives() -> None:
    found = sheet_of_card("NVIDIA H200")
    assert found is not None
    assert found.name == "h200"
    assert sheet_of_card("NVIDIA A100 80GB PCIe") is None
    names = [name for sheet in sheet_names() for name in read_sheet(sheet).driver_names]
    assert len(set(names)) == len(names) >= len(sheet_names())


def test_auto_is_bfloat16_on_every_catalogued_gpu() -> None:
    assert choose_dtype(RunDtype.auto, None) is Dtype.bfloat16
    assert choose_dtype(RunDtype.float32, None) is Dtype.float32


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus_per_node": 0}, r"cluster\.gpus_per_node=0: must be at least 1"),
        ({"num_nodes": 0}, r"cluster\.num_nodes=0: must be at least 1"),
        ({"gpus_per_node": None}, r"cluster\.gpus_per_node is null: with cluster\.gpu=a100-80"),
        ({"device": "cpu"}, r"cluster\.device=cpu goes with workers .* cluster\.gpu=a100-80"),
        ({"price_per_gpu_hour": 0.0}, r"cluster\.price_per_gpu_hour=0\.0: must be above 0"),
        ({"price_per_gpu_hour": float("nan")}, r"cluster\.price_per_gpu_hour=nan: must be above 0"),
    ],
)
def test_impossible_clusters_are_refused(changes, said) -> None:
    with pytest.raises(ConfigError, match=said):
        a100_cluster(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"source": ProfileSource.vidur},
            r"profile\.path is null: profile\.source=vidur needs the directory",
        ),
        (
            {"source": ProfileSource.analytic, "path": Path("p")},
            r"profile\.path=p is not read by profile\.source=analytic",
        ),
        (
            {"source": ProfileSource.aiconfigurator, "path": Path("p"), "network": Path("n")},
            r"profile\.network=n is read by profile\.source=vidur only",
        ),
        ({"same_shape": True}, r"profile\.same_shape=true is read by profile\.source=llmservingsim only"),
    ],
)
def test_sources_read_the_keys_that_they_say(changes, said) -> None:
    with pytest.raises(ConfigError, match=said):
        ProfileSettings(cache_dir=Path("c"), **changes)
