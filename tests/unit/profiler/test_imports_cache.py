"""Imported profiles are kept by the content of their tables, and foreign tables are refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from import_tables import llama, write_table
from test_imports_vidur import mlp_rows

from exegpt.errors import ProfileError
from exegpt.profiler.imports import cache
from exegpt.profiler.imports.cache import Import, imported_profile
from exegpt.profiler.imports.columns import read_columns
from exegpt.profiler.provenance import provenance_of
from exegpt.profiler.sheet import read_sheet
from exegpt.settings import ProfileSource
from exegpt.specs import Dtype, ModelFamily

A40 = read_sheet("a40-48")


@pytest.fixture
def wanted(tmp_path: Path) -> Import:
    """Vidur's tables of a small model, for a node of two GPUs."""
    write_table(tmp_path / "tables" / "mlp.csv", mlp_rows())
    return Import(
        source=ProfileSource.vidur,
        directory=tmp_path / "tables",
        model=llama(),
        sheet=A40,
        dtype=Dtype.float16,
        gpus_per_node=2,
        num_ranks=2,
        device="a40-48",
    )


def test_the_second_use_reads_what_the_first_wrote(wanted: Import, tmp_path: Path, monkeypatch) -> None:
    first, path = imported_profile(wanted, tmp_path / "cache")
    assert path.parent == tmp_path / "cache" / "profiles"
    monkeypatch.setattr(cache, "_read", lambda wanted: pytest.fail("the tables were read again"))
    second, same = imported_profile(wanted, tmp_path / "cache")
    assert same == path
    assert second.key == first.key
    assert provenance_of(second) == provenance_of(first)
    assert second.layers[2].linear.values_s.tolist() == first.layers[2].linear.values_s.tolist()


@pytest.mark.parametrize("change", ["tables", "dtype", "ranks", "sheet", "nothing", "other file"])
def test_whatever_a_profile_depends_on_is_in_its_name(wanted: Import, change: str) -> None:
    before, after = wanted.digest(), wanted
    match change:
        case "tables":
            write_table(wanted.directory / "mlp.csv", mlp_rows()[:-1])
        case "dtype":
            after = replace(wanted, dtype=Dtype.bfloat16)
        case "ranks":
            after = replace(wanted, num_ranks=4)
        case "sheet":
            after = replace(wanted, sheet=replace(A40, query_s=1e-3))
        case "other file":
            (wanted.directory / "notes.csv").write_text("a\n1\n")
    assert (after.digest() == before) == (change in ("nothing", "other file"))


def test_refresh_reads_anew_and_larger_groups_than_a_node_are_left_out(
    wanted: Import, tmp_path: Path
) -> None:
    imported_profile(wanted, tmp_path)
    one = replace(wanted, gpus_per_node=1)
    table, path = imported_profile(one, tmp_path)
    assert sorted(table.layers) == [1]
    assert table.provenance["send"] == "formula (a40-48, uncalibrated)"
    path.write_text("{}")
    with pytest.raises(ProfileError, match="version"):
        imported_profile(one, tmp_path)
    assert sorted(imported_profile(one, tmp_path, refresh=True)[0].layers) == [1]


def test_messages_between_nodes_are_not_those_within_one(wanted: Import, tmp_path: Path) -> None:
    inside, _ = imported_profile(wanted, tmp_path)
    across, _ = imported_profile(replace(wanted, num_ranks=4), tmp_path)
    assert across.send.at(1e6) > inside.send.at(1e6)


def test_tables_in_the_folder_of_another_card_are_refused(wanted: Import, tmp_path: Path) -> None:
    folder = tmp_path / "A100" / "llama"
    write_table(folder / "mlp.csv", mlp_rows())
    with pytest.raises(ProfileError, match=r"of a100-40 or a100-80, by the folder A100, but cluster\.gpu is"):
        imported_profile(replace(wanted, directory=folder), tmp_path)
    fitting = replace(wanted, directory=folder, sheet=read_sheet("a100-80"), device="a100-80")
    assert imported_profile(fitting, tmp_path)[0].key.device == "a100-80"


def test_models_of_other_layers_are_refused(wanted: Import, tmp_path: Path) -> None:
    experts = llama(num_experts=8, num_experts_per_token=2, moe_intermediate_size=256)
    with pytest.raises(ProfileError, match=r"profile\.source=vidur.*a model with experts.*analytic"):
        imported_profile(replace(wanted, model=experts), tmp_path)
    t5 = llama(family=ModelFamily.T5, num_key_value_heads=8)
    with pytest.raises(ProfileError, match="an encoder-decoder model"):
        imported_profile(replace(wanted, model=t5), tmp_path)


def test_missing_directories_and_damaged_tables_are_named_once(wanted: Import, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"profile\.network=.*nowhere: no such directory"):
        imported_profile(replace(wanted, network=tmp_path / "nowhere"), tmp_path)
    with pytest.raises(ProfileError, match=r"^profile\.path=\S+nowhere: no such directory"):
        imported_profile(replace(wanted, directory=tmp_path / "nowhere"), tmp_path)
    (wanted.directory / "mlp.csv").write_text("")
    with pytest.raises(ProfileError, match=r"^profile\.path=.*mlp\.csv: holds no rows"):
        imported_profile(wanted, tmp_path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(ProfileError, match=r"pip install 'exegpt\[parquet\]'"):
        read_columns(tmp_path / "t.parquet")
