"""The schedule file: what is written is read, and each fault names its key."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from exegpt.errors import ConfigError, ScheduleError
from exegpt.schedule import Knobs, Schedule, Stage, from_dict, read_schedule, to_dict, write_schedule
from exegpt.specs import ModelFamily, ModelSpec, Policy

MODEL = ModelSpec(
    name="tiny",
    family=ModelFamily.LLAMA,
    num_hidden_layers=6,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=256,
    max_position_embeddings=512,
)
SCHEDULE = Schedule(
    model="tiny",
    policy=Policy.RRA,
    knobs=Knobs(
        encode_batch_size=8,
        decode_batch_size=20,
        decode_iterations=7,
        num_micro_batches=2,
        tp_size=2,
        num_tp_gpus=2,
    ),
    stages=(Stage(role="both", ranks=(0, 1), layers=(0, 4)), Stage(role="both", ranks=(2,), layers=(4, 6))),
    lengths={"digest": "abc", "mean_output": 32.5},
    predicted={"throughput_per_s": 1.5},
)


def stage(ranks: tuple[int, ...], layers: tuple[int, int]) -> Stage:
    """A stage that encodes and decodes."""
    return Stage(role="both", ranks=ranks, layers=layers)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "schedule.yaml"
    write_schedule(SCHEDULE, path)
    assert read_schedule(path) == SCHEDULE
    assert yaml.safe_load(path.read_text())["version"] == 1


SIDES = dataclasses.replace(
    SCHEDULE,
    policy=Policy.WAA,
    knobs=dataclasses.replace(SCHEDULE.knobs, encode_gpus=2, decode_tp_size=1, num_decode_tp_gpus=1),
    stages=(
        Stage(role="encode", ranks=(0, 1), layers=(0, 6)),
        Stage(role="decode", ranks=(2,), layers=(0, 2)),
        Stage(role="decode", ranks=(3,), layers=(2, 6)),
    ),
)


def test_round_trip_of_two_sides(tmp_path: Path) -> None:
    path = tmp_path / "schedule.yaml"
    write_schedule(SIDES, path)
    assert read_schedule(path) == SIDES
    # Knobs that the policy does not have are left out.
    assert "token_budget" not in path.read_text()
    SIDES.check(MODEL, num_ranks=4)
    assert [s.ranks for s in SIDES.stages_of("decode")] == [(2,), (3,)]


def test_ranks_of_all_instances_are_counted() -> None:
    knobs = dataclasses.replace(SIDES.knobs, num_encode_instances=3, num_decode_instances=2)
    schedule = dataclasses.replace(SIDES, policy=Policy.DISAGGREGATED, knobs=knobs)
    assert schedule.num_ranks == 3 * 2 + 2 * 2


def test_each_side_holds_all_layers() -> None:
    short = dataclasses.replace(SIDES, stages=SIDES.stages[:2])
    with pytest.raises(ScheduleError, match="stages of role decode hold 2 layers, tiny has 6"):
        short.check(MODEL, num_ranks=4)
    gap = (*SIDES.stages[:2], Stage(role="decode", ranks=(3,), layers=(3, 6)))
    with pytest.raises(ScheduleError, match=r"stages\[2\].layers=\[3, 6\] must start at 2"):
        dataclasses.replace(SIDES, stages=gap).check(MODEL, num_ranks=4)


def test_sides_have_roles_of_their_own_in_order() -> None:
    data = to_dict(SIDES)
    data["stages"].reverse()
    with pytest.raises(ScheduleError, match="role encode must stand before those of role decode"):
        from_dict(data, source="s.yaml")
    data["stages"][0]["role"] = "both"
    with pytest.raises(ScheduleError, match=r"role='both'; allowed for WAA: \['encode', 'decode'\]"):
        from_dict(data, source="s.yaml")


def test_derived_sizes() -> None:
    assert SCHEDULE.num_ranks == 3
    assert [stage.tp_size for stage in SCHEDULE.stages] == [2, 1]
    assert [stage.num_layers for stage in SCHEDULE.stages] == [4, 2]


def test_lengths_and_prediction_may_be_left_out() -> None:
    data = to_dict(SCHEDULE)
    del data["lengths"], data["predicted"]
    schedule = from_dict(data, source="s.yaml")
    assert schedule.lengths == schedule.predicted == {}


def set_at(*keys: Any) -> Callable[[Any], Callable[[dict[str, Any]], None]]:
    """`set_at(*keys)(value)` is an edit of a schedule's plain values."""

    def with_value(value: Any) -> Callable[[dict[str, Any]], None]:
        def edit(data: dict[str, Any]) -> None:
            node: Any = data
            for key in keys[:-1]:
                node = node[key]
            node[keys[-1]] = value

        return edit

    return with_value


def without(*keys: Any) -> Callable[[dict[str, Any]], None]:
    """An edit that removes a key."""

    def edit(data: dict[str, Any]) -> None:
        node: Any = data
        for key in keys[:-1]:
            node = node[key]
        del node[keys[-1]]

    return edit


FAULTS = [
    (set_at("polcy")("RRA"), "unknown key 'polcy'; known: .*'policy'"),
    (set_at("version")(2), "version=2, this release reads version 1"),
    (without("version"), "version=None"),
    (set_at("policy")("ORCA"), r"policy='ORCA'; allowed: \['RRA', 'WAA_C', .*'DISAGGREGATED'\]"),
    (set_at("policy")(["RRA"]), r"policy=\['RRA'\]; allowed"),
    (set_at("model")(7), "model=7 must be a name"),
    (without("model"), "model=None must be a name"),
    (set_at("num_replicas")(0), "num_replicas=0 must be an integer of at least 1"),
    (set_at("num_replicas")("one"), "num_replicas='one' must be an integer of at least 1"),
    (set_at("knobs")([1]), "knobs must be a mapping of .*'decode_iterations'"),
    (without("knobs"), "knobs must be a mapping"),
    (set_at("knobs", "N_D")(7), "unknown key knobs.N_D; known"),
    (set_at("knobs", "decode_iterations")(0), "knobs.decode_iterations=0 must be an integer of at least 1"),
    (set_at("knobs", "decode_iterations")(True), "knobs.decode_iterations=True must be an integer"),
    (set_at("knobs", "tp_size")(1.5), "knobs.tp_size=1.5 must be an integer"),
    (without("knobs", "num_tp_gpus"), "knobs.num_tp_gpus=None must be an integer"),
    (set_at("stages")([]), "stages must be a list of at least one stage"),
    (set_at("stages")({"role": "both"}), "stages must be a list"),
    (set_at("stages", 1)("both"), r"stages\[1\] must have exactly the keys role, ranks and layers"),
    (without("stages", 0, "ranks"), r"stages\[0\] must have exactly the keys"),
    (set_at("stages", 0, "tp")(2), r"stages\[0\] must have exactly the keys"),
    (set_at("stages", 0, "role")("encode"), r"stages\[0\].role='encode'; allowed for RRA: \['both'\]"),
    (set_at("knobs", "encode_gpus")(0), "knobs.encode_gpus=0 must be an integer of at least 1"),
    (set_at("knobs", "token_budget")("many"), "knobs.token_budget='many' must be an integer"),
    (set_at("stages", 0, "ranks")([]), r"stages\[0\].ranks=\[\] must be a list of integers"),
    (set_at("stages", 0, "ranks")([0, -1]), r"stages\[0\].ranks=\[0, -1\] must be a list of integers"),
    (set_at("stages", 0, "ranks")([True]), r"stages\[0\].ranks=\[True\] must be a list of integers"),
    (set_at("stages", 1, "layers")("4-6"), r"stages\[1\].layers='4-6' must be a list of integers"),
    (
        set_at("stages", 1, "layers")([4, 5, 6]),
        r"stages\[1\].layers=\[4, 5, 6\] must be \[first, last \+ 1\]",
    ),
]


@pytest.mark.parametrize(("edit", "message"), FAULTS, ids=[message[:40] for _, message in FAULTS])
def test_faults_name_file_and_key(
    edit: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    data = copy.deepcopy(to_dict(SCHEDULE))
    edit(data)
    path = tmp_path / "edited.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ScheduleError, match=message) as caught:
        read_schedule(path)
    assert "edited.yaml" in str(caught.value)


def test_missing_file_says_what_writes_one(tmp_path: Path) -> None:
    with pytest.raises(
        ScheduleError, match=r"schedule=.*none.yaml: no such file; `command=solve` writes one"
    ):
        read_schedule(tmp_path / "none.yaml")


def test_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="schedule="):
        read_schedule(tmp_path)


@pytest.mark.parametrize("text", ["a: [1, 2", "\tx: 1", "{"])
def test_not_yaml(text: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.yaml"
    path.write_text(text)
    with pytest.raises(ScheduleError, match="not YAML"):
        read_schedule(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x81", b"\x80abc"])
def test_binary_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "schedule.yaml"
    path.write_bytes(content)
    with pytest.raises(ScheduleError, match="schedule="):
        read_schedule(path)


@pytest.mark.parametrize("text", ["", "[1, 2]", "RRA", "3"])
def test_not_a_mapping(text: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.yaml"
    path.write_text(text)
    with pytest.raises(ScheduleError, match="expected a mapping with the keys of a schedule, found"):
        read_schedule(path)


def test_check_accepts_a_schedule_that_fits() -> None:
    SCHEDULE.check(MODEL, num_ranks=3)
    SCHEDULE.check(MODEL, num_ranks=8)
    dataclasses.replace(SCHEDULE, num_replicas=2).check(MODEL, num_ranks=6)


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_workers_do_not_execute_is_refused_in_one_line(policy: Policy, num_replicas: int) -> None:
    schedule = dataclasses.replace(SCHEDULE, policy=policy, num_replicas=num_replicas)
    if policy in (Policy.RRA, Policy.STATIC) and num_replicas == 1:
        schedule.require_runnable()
        return
    with pytest.raises(ScheduleError, match=r"^s.yaml: .*command=simulate, or solve with solver\.") as caught:
        schedule.require_runnable("s.yaml")
    reason = "num_replicas=2" if policy in (Policy.RRA, Policy.STATIC) else f"policy={policy.value} "
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "num_ranks", "message"),
    [
        ({"model": "other"}, 3, "model is other, but model.name=tiny"),
        ({}, 2, "stages name 3 ranks, but the cluster has 2 .*Solve again"),
        ({"num_replicas": 2}, 5, "stages name 2 replicas of 3 ranks, but the cluster has 5 "),
        (
            {"stages": (stage((1,), (0, 4)), stage((0,), (4, 6)))},
            3,
            r"ranks are \[1, 0\], expected 0..1 in order",
        ),
        (
            {"stages": (stage((0,), (0, 4)), stage((0,), (4, 6)))},
            3,
            r"ranks are \[0, 0\], expected",
        ),
        (
            {"stages": (stage((0,), (0, 3)), stage((1,), (4, 6)))},
            3,
            r"stages\[1\].layers=\[4, 6\] must start at 3",
        ),
        (
            {"stages": (stage((0,), (0, 6)), stage((1,), (6, 6)))},
            3,
            r"stages\[1\].layers=\[6, 6\] must start at 6 and hold a layer",
        ),
        (
            {"stages": (stage((0,), (0, 5)),)},
            3,
            "stages hold 5 layers, tiny has 6",
        ),
        (
            {"stages": (stage((0, 1, 2), (0, 6)),)},
            3,
            r"split 3 ways, but tiny has 4 heads and 2 K/V heads; allowed: \[1, 2\]",
        ),
    ],
)
def test_check_says_what_does_not_fit(change: dict[str, Any], num_ranks: int, message: str) -> None:
    schedule = dataclasses.replace(SCHEDULE, **change)
    with pytest.raises(ScheduleError, match=message):
        schedule.check(MODEL, num_ranks=num_ranks, source="s.yaml")


def test_schedule_errors_are_configuration_errors() -> None:
    assert issubclass(ScheduleError, ConfigError)
