import gzip
import json
from collections import Counter

import pytest

from exegpt.errors import TraceError
from exegpt.workload.prompts import Prompt, default_prompts, read_prompts


def test_shipped_prompts():
    prompts = default_prompts()
    assert len(prompts) == 96
    assert len({prompt.id for prompt in prompts}) == 96
    assert len({prompt.prompt for prompt in prompts}) == 96
    assert all(prompt.error is None and prompt.kind for prompt in prompts)
    words = [len(prompt.prompt.split()) for prompt in prompts]
    assert min(words) <= 5
    assert 200 <= max(words) <= 250
    # Any start of the file is a mixture of kinds.
    assert len(Counter(prompt.kind for prompt in prompts[:12])) >= 8


def test_jsonl(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "Hello", "id": 7, "max_output_tokens": 9, "extra": []}\n'
        "\n"
        '"Just text"\n'
        '{"prompt": "Grüße", "kind": "greeting", "output_tokens": 3}\n',
        encoding="utf-8",
    )
    assert read_prompts(path) == [
        Prompt(id="7", prompt="Hello", max_output_tokens=9),
        Prompt(id="1", prompt="Just text"),
        Prompt(id="2", prompt="Grüße", kind="greeting", output_tokens=3),
    ]


def test_json_list_and_gzip(tmp_path):
    path = tmp_path / "p.json.gz"
    path.write_bytes(gzip.compress(json.dumps(["a", {"prompt": "b"}]).encode()))
    assert [prompt.prompt for prompt in read_prompts(path)] == ["a", "b"]


def test_text(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("What is red?\r\n\r\n  Name a tree. \n\n")
    prompts = read_prompts(path)
    assert [prompt.prompt for prompt in prompts] == ["What is red?", "", "Name a tree."]
    assert [prompt.error for prompt in prompts] == [None, "the prompt is empty", None]


def test_empty_prompts_are_kept(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": " \\n"}\n{"prompt": "x"}\n')
    assert [prompt.error for prompt in read_prompts(path)] == ["the prompt is empty", None]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", "", "the file is empty"),
        ("p.txt", "\n\n", "the file is empty"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ("p.jsonl", '{"prompt": "a"}\n3\n', "line 2: expected a string or an object, found int"),
        ("p.jsonl", '{"text": "a"}\n', "line 1: prompt is missing, expected text. Present: 'text'"),
        ("p.jsonl", '{"prompt": null}\n', "line 1: prompt is None"),
        ("p.jsonl", '{"messages": []}\n', "`messages` are not read"),
        (
            "p.jsonl",
            '{"prompt": "a", "max_output_tokens": 0}\n',
            "line 1: max_output_tokens is 0, expected a whole",
        ),
        ("p.jsonl", '{"prompt": "a", "output_tokens": true}\n', "line 1: output_tokens is True"),
        ("p.jsonl", '{"prompt": "a", "output_tokens": 1.5}\n', "line 1: output_tokens is 1.5"),
        ("p.jsonl", '{"prompt": "a", "kind": 3}\n', "line 1: kind is 3"),
        ("p.jsonl", '{"prompt": "a", "id": []}\n', r"line 1: id is \[\]"),
        (
            "p.jsonl",
            '{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n',
            "line 2: id 'x' is that of line 1",
        ),
        ("p.json", "[]", "expected a list of prompts"),
        ("p.json", '{"prompt": "a"}', "expected a list of prompts"),
        ("p.json", '["a", 1]', "item 2: expected a string"),
        ("p.csv", "a", "unknown kind of file '.csv'; known: .jsonl"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as caught:
        read_prompts(path)
    assert f"workload.path={path}" in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        read_prompts(tmp_path / "p.jsonl")
