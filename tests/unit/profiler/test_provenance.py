"""Where costs come from, in words, and that a file keeps it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from synthetic import tiny_model, tiny_profile

from exegpt.errors import ProfileError
from exegpt.profiler.grid import make_grid
from exegpt.profiler.provenance import formula_kind, formula_provenance, provenance_of, provenance_summary
from exegpt.profiler.sheet import read_sheet
from exegpt.profiler.table import read_profile, write_profile

H200, L40S, A100, A40 = (read_sheet(name) for name in ("h200", "l40s", "a100-80", "a40-48"))


@pytest.fixture
def table():
    return tiny_profile(tiny_model(), tp_sizes=(1, 2))


def test_a_formula_is_calibrated_where_a_table_of_the_card_stands_behind_it() -> None:
    assert formula_kind(H200, "tp2.decode_attention") == "formula (h200, calibrated)"
    # The H200's sheet borrows its elementwise kernels, the small part of a layer.
    assert formula_kind(H200, "tp2.linear") == "formula (h200, calibrated), elementwise as a100-80"
    assert formula_kind(H200, "tp2.embed") == "formula (h200, uncalibrated)"
    assert formula_kind(A40, "tp2.encode_attention") == "formula (a40-48, uncalibrated)"
    assert formula_kind(A100, "tp2.linear") == "formula (a100-80, calibrated)"
    assert formula_kind(L40S, "tp1.encode_attention") == "formula (l40s, uncalibrated)"
    assert formula_kind(A100, "tp2.all_reduce") == "formula (a100-80, calibrated)"
    # Overheads are the host's, whatever the card.
    assert formula_kind(A100, "tp2.decode_overhead") == "formula (a100-80, uncalibrated)"


def test_one_line_per_kind(table) -> None:
    table = replace(table, provenance=formula_provenance(table.grids(), A100))
    calibrated, uncalibrated = sorted(provenance_summary(table))
    assert calibrated.startswith("costs formula (a100-80, calibrated): ")
    assert "linear, encode_attention, decode_attention, head, embed at TP 1, 2" in calibrated
    assert "all_reduce at TP 2" in calibrated
    assert uncalibrated.endswith("(a100-80, uncalibrated): encode_overhead, decode_overhead at TP 1, 2")


def test_files_that_do_not_say_are_ours_or_unknown(table) -> None:
    assert set(provenance_of(table).values()) == {"unknown"}
    ours = replace(table, key=replace(table.key, software="torch 2.8, exegpt 1"))
    assert set(provenance_of(ours).values()) == {"measured"}


def test_repairs_are_said_and_kept_in_the_file(table, tmp_path) -> None:
    falling = make_grid("tp1.head", ("queries",), [np.array([1.0, 2.0, 4.0])], np.array([1e-3, 2e-3, 1e-3]))
    assert falling.repaired == pytest.approx(0.5)
    layers = {**table.layers, 1: replace(table.layers[1], head=falling)}
    bent = replace(table, layers=layers, provenance={"tp1.head": "measured (Vidur)"})
    for found in (bent, _through_a_file(bent, tmp_path)):
        assert provenance_of(found)["tp1.head"] == "measured (Vidur), made isotone by up to 50%"
        assert provenance_of(found)["tp2.head"] == "unknown"
        assert "made isotone in 1 tables, at most tp1.head by 50%" in provenance_summary(found)[-1]


def _through_a_file(table, tmp_path):
    write_profile(table, tmp_path / "p.json")
    return read_profile(tmp_path / "p.json")


def test_files_without_provenance_stay_valid_and_foreign_ones_are_refused(table, tmp_path) -> None:
    path = tmp_path / "p.json"
    write_profile(table, path)
    data = json.loads(path.read_text())
    del data["provenance"]
    path.write_text(json.dumps(data))
    assert dict(read_profile(path).provenance) == {}
    path.write_text(json.dumps({**data, "provenance": ["measured"]}))
    with pytest.raises(ProfileError, match=r"p\.json: provenance must map the names of tables"):
        read_profile(path)
