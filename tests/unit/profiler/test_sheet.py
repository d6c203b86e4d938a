"""GPU sheets: what the package ships, what users write, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from exegpt.errors import ConfigError
from exegpt.profiler import sheet as sheet_module
from exegpt.profiler.sheet import read_sheet, sheet_names

SHEETS = Path(sheet_module.__file__).parent / "sheets"
CARDS = ["a100-40", "a100-80", "a40-48", "a6000", "h100", "h200", "l40s", "rtx3090", "rtx4090", "rtxpro6000"]


def changed(tmp_path: Path, key: str, value: object) -> Path:
    """A copy of the template with one (dotted) key changed, or removed if the value is Ellipsis."""
    values = yaml.safe_load((SHEETS / "custom.yaml").read_text())
    *parents, last = key.split(".")
    place = values
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_shipped_sheets_are_all_listed() -> None:
    assert sheet_names() == CARDS


@pytest.mark.parametrize("name", CARDS)
def test_shipped_sheet_is_named_as_its_file_and_plausible(name: str) -> None:
    sheet = read_sheet(name)
    assert sheet.name == name
    assert 20 * 2**30 < sheet.memory_bytes < 200 * 2**30
    # From an A40's 215 operations per byte to an RTX PRO 6000's 281 (L40S: 419).
    assert 50 < sheet.peak_flops_per_s / sheet.memory_bandwidth_bytes_per_s < 500
    assert sheet.peak_float32_flops_per_s < sheet.peak_flops_per_s
    for link in (sheet.intra_node, sheet.inter_node, sheet.host):
        assert 0 < link.bandwidth_fraction <= 1


@pytest.mark.parametrize("name", CARDS)
def test_every_stated_number_has_its_source(name: str) -> None:
    text = (SHEETS / f"{name}.yaml").read_text()
    assert "# Stated numbers: NVIDIA" in text
    for key in ("memory_bytes", "peak_flops_per_s", "num_multiprocessors", "kernel_launch_s", "iteration_s"):
        line = next(line for line in text.splitlines() if line.startswith(f"{key}:"))
        assert "#" in line


@pytest.mark.parametrize("name", CARDS)
def test_an_efficiency_is_measured_or_borrowed(name: str) -> None:
    sheet = read_sheet(name)
    assert sheet.is_calibrated == (name not in ("a100-40", "h100", "l40s"))
    assert sheet.is_calibrated or len(sheet.borrowed) == 4
    for operator, lender in sheet.borrowed.items():
        assert getattr(sheet.efficiency, operator) == getattr(read_sheet(lender).efficiency, operator)


def test_calibration_tables_exist(data_dir: Path) -> None:
    for name in CARDS:
        for table in read_sheet(name).calibrated_on:
            assert (data_dir / "profiles" / table.split(" (")[0]).is_file()


def test_label_says_what_is_calibrated() -> None:
    assert read_sheet("a100-80").label == "a100-80: calibrated on 10 measured tables"
    assert read_sheet("l40s").label == "l40s: uncalibrated (efficiencies as rtx4090)"
    assert read_sheet("h200").label.endswith("; uncalibrated: elementwise as a100-80")
    assert replace(read_sheet("h200"), calibrated_on=(), borrowed={}).label == "h200: uncalibrated"


def test_template_is_a_valid_uncalibrated_sheet(tmp_path: Path) -> None:
    path = tmp_path / "copy.yaml"
    path.write_bytes((SHEETS / "custom.yaml").read_bytes())
    sheet = read_sheet(path)
    assert not sheet.is_calibrated
    assert read_sheet(str(path)) == sheet


def test_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    """YAML 1.1 reads 7e-6 as text."""
    path = changed(tmp_path, "kernel_launch_s", "7e-6")
    assert read_sheet(path).kernel_launch_s == 7e-6


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("memory_bytes", -1, r"memory_bytes=-1 must be a finite number above 0"),
        ("memory_bytes", "48 GB", r"memory_bytes='48 GB' must be a finite number"),
        ("peak_flops_per_s", True, r"peak_flops_per_s=True"),
        ("num_multiprocessors", 0, r"num_multiprocessors=0"),
        ("host.latency_s", float("nan"), r"host\.latency_s=nan must be a finite number at least 0"),
        ("intra_node.bandwidth_bytes_per_s", float("inf"), r"intra_node\.bandwidth_bytes_per_s=inf"),
        ("efficiency.matmul.overlap", 0.5, r"efficiency\.matmul\.overlap=0\.5 must be at least 1"),
        ("efficiency.elementwise.cached_speed", 0.9, r"cached_speed=0\.9 must be at least 1"),
        ("efficiency.matmul", 3, r"efficiency\.matmul must be a mapping"),
        ("efficiency.matmul.tile", 3, r"unknown key efficiency\.matmul\.tile; allowed: fixed_s"),
        ("efficiency.decode_attention.key_tile", ..., r"efficiency\.decode_attention\.key_tile is missing"),
        ("inter_node", ..., r"inter_node is missing"),
        ("name", 5, r"name=5 must be a name"),
        ("calibrated_on", "gemm.csv", r"calibrated_on must be a list"),
        ("borrowed", ["matmul"], r"borrowed must map"),
        ("borrowed", {"sampling": "h100"}, r"borrowed\.sampling is no operator; allowed: matmul"),
    ],
)
def test_wrong_values_are_refused_by_file_and_key(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    path = changed(tmp_path, key, value)
    with pytest.raises(ConfigError, match=message) as caught:
        read_sheet(path)
    assert "mine.yaml" in str(caught.value)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"no GPU sheet 'a100'; there are a100-40, a100-80, .*custom\.yaml"):
        read_sheet("a100")


def test_missing_file_and_broken_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        read_sheet(tmp_path / "nowhere.yaml")
    path = tmp_path / "broken.yaml"
    path.write_text("name: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml: not YAML"):
        read_sheet(path)
    path.write_text("just text")
    with pytest.raises(ConfigError, match=r"broken\.yaml: the file must be a mapping"):
        read_sheet(path)
