"""Reading of foreign tables: formats, and every way in which a file can be wrong."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from import_tables import write_table

from exegpt.errors import ProfileError
from exegpt.profiler.imports.assembly import decode_grid, mean_by
from exegpt.profiler.imports.columns import find_table, need_table, read_columns

ROWS = [{"tokens": 1, "time": 0.5, "layer": "q"}, {"tokens": 2, "time": 0.75, "layer": "k"}]


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_csv_plain_and_gzipped(tmp_path: Path, name: str) -> None:
    table = read_columns(write_table(tmp_path / name, ROWS))
    assert len(table) == 2
    assert table.numbers("time").tolist() == [0.5, 0.75]
    assert table.text("layer").tolist() == ["q", "k"]
    assert table.where(table.text("layer") == "k").numbers("tokens").tolist() == [2]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    table = read_columns(path)
    assert table.numbers("time").tolist() == [0.5, 0.75]
    assert table.text("layer").tolist() == ["q", "k"]
    path.write_bytes(b"PAR1 no more")
    with pytest.raises(ProfileError, match=r"t\.parquet: not a readable table"):
        read_columns(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"holds no rows"),
        ("tokens,time\n", r"holds no rows"),
        ("tokens,time\n1,2\n3\n", r"line 3 has 1 cells, the header 2"),
    ],
)
def test_damaged_csv(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(ProfileError, match=rf"bad\.csv: .*{message}"):
        read_columns(path)


def test_truncated_gzip_and_wrong_files(tmp_path: Path) -> None:
    path = tmp_path / "cut.csv.gz"
    whole = gzip.compress(b"tokens,time\n" + b"1,2\n" * 1000)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ProfileError, match=r"cut\.csv\.gz: not a readable table"):
        read_columns(path)
    path.write_text("not gzip")
    with pytest.raises(ProfileError, match="not a readable table"):
        read_columns(path)
    with pytest.raises(ProfileError, match=r"none\.csv: no such file"):
        read_columns(tmp_path / "none.csv")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match=r"binary\.csv: not a readable table"):
        read_columns(binary)


@pytest.mark.parametrize("value", ["nan", "-0.5", "inf", ""])
def test_impossible_numbers_name_column_and_row(tmp_path: Path, value: str) -> None:
    table = read_columns(write_table(tmp_path / "t.csv", [*ROWS, {"tokens": 3, "time": value, "layer": "v"}]))
    with pytest.raises(ProfileError, match=r"t\.csv: column 'time' holds .* in data row 3"):
        table.numbers("time")


def test_empty_cells_where_they_are_by_design(tmp_path: Path) -> None:
    table = read_columns(write_table(tmp_path / "t.csv", [*ROWS, {"tokens": 3, "time": "", "layer": "v"}]))
    assert np.isnan(table.numbers("time", may_be_empty=True)).tolist() == [False, False, True]


def test_foreign_file_and_text_among_numbers(tmp_path: Path) -> None:
    table = read_columns(write_table(tmp_path / "t.csv", ROWS))
    with pytest.raises(ProfileError, match=r"t\.csv: lacks the column 'latency'.*it has tokens, time, layer"):
        table.numbers("latency")
    with pytest.raises(ProfileError, match=r"column 'layer' holds text"):
        table.numbers("layer")


def test_tables_are_found_by_stem(tmp_path: Path) -> None:
    assert find_table(tmp_path, "mlp") is None
    with pytest.raises(ProfileError, match=r"no mlp\.csv, mlp\.csv\.gz or mlp\.parquet"):
        need_table(tmp_path, "mlp")
    path = write_table(tmp_path / "mlp.csv.gz", ROWS)
    assert find_table(tmp_path, "mlp") == need_table(tmp_path, "mlp") == path


def test_mean_by_takes_the_median_of_repeats() -> None:
    points, times = mean_by([4, 2, 4, 4], np.array([1.0, 9.0, 5.0, 2.0]))
    assert points.tolist() == [2, 4]
    assert times.tolist() == [9, 2]


def test_decode_grid_is_rectangular() -> None:
    """Batch 1 measured to 400 tokens, batch 4 from 40 to 4000: a plane 1 + q + c / 100 seen in pieces."""
    queries = np.array([1, 1, 1, 4, 4, 4], dtype=float)
    contexts = np.array([10, 40, 400, 40, 400, 4000], dtype=float)
    (sizes, axis), table = decode_grid(queries, contexts, 1 + queries + contexts / 100)
    assert sizes.tolist() == [1, 4]
    assert axis.tolist() == [10, 40, 400, 4000]
    # Beyond 400 tokens batch 4 stands for batch 1; below 40 its shortest context stands.
    assert table[0].tolist() == pytest.approx([2.1, 2.4, 6.0, 45.0])
    assert table[1].tolist() == pytest.approx([5.4, 5.4, 9.0, 45.0])


def test_decode_grid_keeps_within_what_the_largest_batch_reached() -> None:
    queries = np.array([1, 1, 4, 4], dtype=float)
    contexts = np.array([10, 1000, 40, 400], dtype=float)
    (_, axis), table = decode_grid(queries, contexts, contexts)
    assert axis.tolist() == [10, 40, 400]
    assert not np.isnan(table).any()
