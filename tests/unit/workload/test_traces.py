import csv
import gzip
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from exegpt.errors import TraceError
from exegpt.workload.traces import read_pairs

DATA = Path(os.environ.get("EXEGPT_DATA", Path(__file__).parents[4] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no public data in {DATA}; set EXEGPT_DATA")

# The table of the data's README: input p50, p90, p99, max, output p50, p90, p99, max, correlation.
PUBLISHED = {
    "traces/AzureLLMInferenceTrace_code.csv.gz": (8819, 1469, 5188, 7436, 7437, 13, 55, 251, 1899, 0.00),
    "traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz": (
        *(30731, 1730, 5696, 7434, 8141, 415, 834, 998, 1024, 0.04),
    ),
    "traces/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz": (
        *(28257, 2730, 3702, 3933, 4054, 167, 372, 3271, 4056, -0.46),
    ),
    "traces/mooncake_synthetic_trace.jsonl.gz": (3993, 11587, 38611, 66456, 191378, 69, 389, 768, 893, -0.37),
    "end_to_end/llmservingsim/RTX4090/Llama-3.1-8B/requests.jsonl.gz": (
        *(300, 732, 1460, 2765, 3998, 632, 770, 784, 1021, 0.16),
    ),
    "traces/wmt21_newstest_de-en_lengths.csv.gz": (1000, 39, 69, 108, 159, 22, 40, 64, 89, 0.93),
    "traces/wmt21_newstest_en-de_lengths.csv.gz": (1002, 29, 51, 80, 158, 58, 103, 157, 326, 0.94),
    "traces/alpaca_eval_alpaca-7b_lengths.csv.gz": (805, 22, 75, 269, 509, 78, 167, 411, 493, 0.11),
}
SPANS_S = {
    "traces/AzureLLMInferenceTrace_code.csv.gz": 3436,
    "traces/mooncake_synthetic_trace.jsonl.gz": 1022,
    "end_to_end/llmservingsim/RTX4090/Llama-3.1-8B/requests.jsonl.gz": 29,
}


@needs_data
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_traces(name):
    trace = read_pairs(DATA / name)
    rows, *percentiles, correlation = PUBLISHED[name]
    assert trace.pairs.shape == (rows, 2)
    # The table interpolates between observations, as numpy does by default, and prints whole tokens.
    found = [np.percentile(trace.pairs[:, side], q) for side in (0, 1) for q in (50, 90, 99, 100)]
    np.testing.assert_allclose(found, percentiles, atol=0.51)
    lengths = trace.lengths()
    assert lengths.correlation == pytest.approx(correlation, abs=0.006)
    assert lengths.output_percentile(99) == np.percentile(trace.pairs[:, 1], 99, method="inverted_cdf")
    assert trace.notes == ()
    if name in SPANS_S:
        assert trace.arrivals_s[0] == 0
        assert trace.arrivals_s[-1] == pytest.approx(SPANS_S[name], abs=0.6)
        assert (np.diff(trace.arrivals_s) >= 0).all()
    else:
        assert trace.arrivals_s is None


@needs_data
def test_published_servegen_windows():
    trace = read_pairs(DATA / "traces/servegen_m-small_chunk-36-dataset.json.gz")
    assert "56 ServeGen windows" in trace.description
    lengths = trace.lengths()
    assert [lengths.input_percentile(q) for q in (50, 90, 99, 100)] == [296, 398, 683, 90764]
    assert [lengths.output_percentile(q) for q in (50, 90, 99, 100)] == [112, 144, 176, 8192]
    assert lengths.mean_input == pytest.approx(335, abs=0.5)
    assert lengths.std_output == pytest.approx(28, abs=0.5)


@needs_data
def test_servegen_rates_are_no_lengths():
    with pytest.raises(TraceError, match=r"no known columns.*'14\.015'"):
        read_pairs(DATA / "traces/servegen_m-small_chunk-36-trace.csv.gz")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.0000000,3180,8
2023-11-17 00:00:00.0000000,110,27
"""


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz", "TRACE.CSV"])
def test_azure(tmp_path, name):
    trace = read_pairs(write(tmp_path / name, AZURE))
    np.testing.assert_array_equal(trace.pairs, [[4808, 10], [3180, 8], [110, 27]])
    np.testing.assert_allclose(trace.arrivals_s, [0, 1.02004, 20576.02004], atol=1e-6)
    assert trace.description == f"{name}: 3 requests, columns of Azure"


def test_azure_with_a_zone(tmp_path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    text += "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00.017335+00:00,2399,6\n"
    trace = read_pairs(write(tmp_path / "week.csv", text))
    np.testing.assert_allclose(trace.arrivals_s, [0, 0.007405], atol=1e-9)


def test_mooncake_milliseconds_are_sorted(tmp_path):
    rows = [(3000, 10, 1), (500, 20, 2), (1500, 30, 3)]
    lines = [json.dumps(dict(timestamp=t, input_length=i, output_length=o, hash_ids=[1])) for t, i, o in rows]
    trace = read_pairs(write(tmp_path / "trace.jsonl.gz", "\n".join(lines) + "\n\n"))
    np.testing.assert_array_equal(trace.pairs, [[20, 2], [30, 3], [10, 1]])
    np.testing.assert_allclose(trace.arrivals_s, [0, 1, 2.5])


@pytest.mark.parametrize(
    ("columns", "layout"),
    [
        (("num_prefill_tokens", "num_decode_tokens"), "Etalon"),
        (("input_toks", "output_toks"), "LLMServingSim"),
        (("input_tokens", "output_tokens"), "input_tokens and output_tokens"),
    ],
)
def test_other_layouts(tmp_path, columns, layout):
    trace = read_pairs(write(tmp_path / "t.csv", f"{columns[0]},{columns[1]},more\n7,3,x\n5,2,y\n"))
    np.testing.assert_array_equal(trace.pairs, [[7, 3], [5, 2]])
    assert trace.arrivals_s is None
    assert layout in trace.description


def test_byte_order_mark_blank_lines_and_whole_floats(tmp_path):
    trace = read_pairs(write(tmp_path / "t.csv", "\ufeffinput_tokens,output_tokens\r\n7.0, 3\r\n\r\n5,2\r\n"))
    np.testing.assert_array_equal(trace.pairs, [[7, 3], [5, 2]])


def test_own_columns(tmp_path):
    path = write(tmp_path / "t.csv", "in,out,input_tokens,output_tokens\n7,3,1,1\n5,2,1,1\n")
    trace = read_pairs(path, input_column="in", output_column="out")
    np.testing.assert_array_equal(trace.pairs, [[7, 3], [5, 2]])
    np.testing.assert_array_equal(read_pairs(path).pairs, [[1, 1], [1, 1]])


def test_list_of_requests(tmp_path):
    path = write(tmp_path / "t.json", '[{"input_tokens": 4, "output_tokens": 2, "arrival_s": 0.5}]')
    trace = read_pairs(path)
    np.testing.assert_array_equal(trace.pairs, [[4, 2]])
    np.testing.assert_array_equal(trace.arrivals_s, [0])


@pytest.mark.parametrize("suffix", [".parquet", ".parquet.gz"])
def test_parquet(tmp_path, suffix):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    plain = tmp_path / "t.parquet"
    parquet.write_table(
        pyarrow.table({"input_length": [9, 8], "output_length": [2, 1], "timestamp": [0, 250]}), plain
    )
    path = tmp_path / f"u{suffix}"
    path.write_bytes(gzip.compress(plain.read_bytes()) if suffix.endswith(".gz") else plain.read_bytes())
    trace = read_pairs(path)
    np.testing.assert_array_equal(trace.pairs, [[9, 2], [8, 1]])
    np.testing.assert_allclose(trace.arrivals_s, [0, 0.25])


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TraceError, match="needs pyarrow: `pip install pyarrow`, or convert"):
        read_pairs(write(tmp_path / "t.parquet", "PAR1"))


def test_corrupt_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(TraceError, match="not a Parquet file, or corrupt"):
        read_pairs(write(tmp_path / "t.parquet", "PAR1 and then nothing that fits PAR1"))


def test_rows_without_output_are_left_out_and_counted(tmp_path):
    trace = read_pairs(
        write(tmp_path / "t.csv", "input_tokens,output_tokens,arrival_s\n7,0,1\n5,2,3\n0,4,4\n6,1,7\n")
    )
    np.testing.assert_array_equal(trace.pairs, [[5, 2], [6, 1]])
    np.testing.assert_allclose(trace.arrivals_s, [0, 4])
    assert trace.notes == ("2 of 4 rows have 0 input or 0 output tokens (no answer) and are left out",)
    assert trace.lengths().notes == trace.notes


HEADER = "input_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"", "the file is empty"),
        ("t.csv", b" \n\n", "the file is empty"),
        ("t.csv.gz", b"", "the file is empty"),
        ("t.csv.gz", gzip.compress(b""), "the file is empty"),
        ("t.csv", HEADER.encode(), "has a header, but no rows"),
        ("t.csv", b"a,b\n1,2\n", "present: 'a', 'b'. Set workload.input_column and workload.output_column"),
        (
            "t.csv",
            (HEADER + "5,2\n7,many\n").encode(),
            "line 3: output_tokens is 'many', expected a whole number",
        ),
        ("t.csv", (HEADER + "5,2\n7\n").encode(), "line 3: output_tokens is nothing"),
        ("t.csv", (HEADER + "5,\n").encode(), "line 2: output_tokens is nothing"),
        ("t.csv", (HEADER + "nan,2\n").encode(), "line 2: input_tokens is 'nan'"),
        ("t.csv", (HEADER + "inf,2\n").encode(), "line 2: input_tokens is 'inf'"),
        ("t.csv", (HEADER + "5.5,2\n").encode(), "line 2: input_tokens is '5.5'"),
        ("t.csv", (HEADER + "5,-2\n").encode(), "line 2: output_tokens is -2, allowed are 0 to 10000000"),
        ("t.csv", (HEADER + "1700000000,2\n").encode(), "line 2: input_tokens is 1700000000, allowed"),
        ("t.csv", (HEADER + "0,0\n5,0\n").encode(), "every row has 0 input or 0 output tokens"),
        ("t.csv", b"\x89PNG\r\n\x1a\n\xff\xfe", "not UTF-8 text"),
        ("t.csv", b"\0\0\0\0", "a binary file"),
        ("t.csv.gz", b"input_tokens,output_tokens\n1,2\n", "not a gzip file, or corrupt"),
        ("t.csv.gz", gzip.compress(AZURE.encode() * 40)[:60], "truncated"),
        ("t.jsonl", b'{"input_tokens": 1, "output_tokens": 2}\n{"input_tok\n', "line 2: not JSON"),
        ("t.jsonl", b"[1, 2]\n", "line 1: expected an object, found list"),
        ("t.jsonl", b'{"input_tokens": true, "output_tokens": 2}\n', "line 1: input_tokens is True"),
        ("t.jsonl", b'{"input_tokens": NaN, "output_tokens": 2}\n', "line 1: input_tokens is nan"),
        ("t.jsonl", b'{"input_tokens": [1], "output_tokens": 2}\n', r"line 1: input_tokens is \[1\]"),
        (
            "t.jsonl",
            b'{"input_tokens": 1, "output_tokens": 2, "arrival_s": null}\n',
            "line 1: arrival_s is None",
        ),
        ("t.json", b'"text"', "expected a list of requests"),
        ("t.json", b"[]", "has a header, but no rows"),
        ("t.json", b'[\n{"input_tokens": 1,\n}]', "line 3: not JSON"),
        ("t.json", b'[{"input_tokens": 1, "output_tokens": "x"}]', "item 1: output_tokens is 'x'"),
        ("t.txt", b"1 2\n", "unknown kind of file '.txt'; known: .csv"),
        ("trace", b"1 2\n", "unknown kind of file ''"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        read_pairs(path)
    assert f"workload.path={path}" in str(caught.value)


def test_corrupt_gzip_body(tmp_path):
    data = bytearray(gzip.compress(AZURE.encode() * 40))
    data[30] ^= 0xFF
    path = tmp_path / "t.csv.gz"
    path.write_bytes(data)
    with pytest.raises(TraceError, match="gzip"):
        read_pairs(path)


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        read_pairs(tmp_path / "t.csv")
    with pytest.raises(TraceError, match="is a directory"):
        read_pairs(tmp_path)


def test_bad_time(tmp_path):
    with pytest.raises(TraceError, match="line 3: TIMESTAMP is 'noon', expected a time of arrival"):
        read_pairs(write(tmp_path / "t.csv", AZURE.replace("2023-11-16 18:17:05.0000000", "noon")))


def test_overlong_field(tmp_path):
    path = write(tmp_path / "t.csv", HEADER + "1" * (csv.field_size_limit() + 1) + ",2\n")
    with pytest.raises(TraceError, match="not CSV"):
        read_pairs(path)


def test_own_columns_must_exist_and_come_in_pairs(tmp_path):
    path = write(tmp_path / "t.csv", AZURE)
    with pytest.raises(TraceError, match="no column 'in'; present: 'TIMESTAMP', 'ContextTokens'"):
        read_pairs(path, input_column="in", output_column="GeneratedTokens")
    with pytest.raises(TraceError, match="set both, or neither"):
        read_pairs(path, input_column="ContextTokens")
