"""Which backend is used, and what happens where C++ does not build."""

import fcntl
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from exegpt.errors import ConfigError
from exegpt.kernels import append_kv, backend, native, selection, set_backend

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


@pytest.fixture
def no_compiler(fresh_build: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "compiler-that-is-not-there")


@NEEDS_COMPILER
def test_a_compiler_means_compiled_kernels() -> None:
    assert backend() == "c++"


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_stands_in_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    pages = torch.zeros(1, 1, 4, 8)
    for slot in range(3):
        append_kv(torch.ones(1, 1, 8), torch.ones(1, 1, 8), pages, pages.clone(), torch.tensor([slot]))
    assert backend() == "torch"
    assert pages[0, 0, :3].all()
    assert len(caplog.records) == 1
    assert "no C++ compiler 'compiler-that-is-not-there'" in caplog.text
    assert "slower" in caplog.text
    assert "EXEGPT_KERNELS=torch" in caplog.text


@pytest.mark.usefixtures("no_compiler")
def test_torch_by_choice_does_not_warn(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(selection.VARIABLE, "torch")
    assert backend() == "torch"
    assert not caplog.records


@pytest.mark.usefixtures("no_compiler")
def test_forced_compiled_kernels_fail_where_they_do_not_build(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"Install g\+\+"):
        set_backend("c++")
    monkeypatch.setenv(selection.VARIABLE, "c++")
    with pytest.raises(ConfigError, match=r"Install g\+\+"):
        backend()


def test_set_backend_beats_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selection.VARIABLE, "none such")
    set_backend("torch")
    assert backend() == "torch"


def test_unknown_backends_are_named_with_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"set_backend: .*'cuda'.*'c\+\+' or 'torch'"):
        set_backend("cuda")
    monkeypatch.setenv(selection.VARIABLE, "fast")
    with pytest.raises(ConfigError, match=r"EXEGPT_KERNELS: .*'fast'"):
        backend()


@pytest.mark.usefixtures("fresh_build")
def test_failed_build_tells_the_compilers_complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "sources"
    source.mkdir()
    for name in native._HEADERS + native._SOURCES:
        (source / name).write_text("#error this cannot be compiled\n")
    monkeypatch.setattr(native, "_HERE", source)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    with pytest.raises(native.BuildError, match="this cannot be compiled"):
        native.load_library()


@NEEDS_COMPILER
@pytest.mark.usefixtures("fresh_build")
def test_leftovers_of_a_killed_build_neither_hang_nor_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = native.build_folder()
    (folder / "build").mkdir(parents=True)
    (folder / "build" / "lock").touch()  # torch waits for this one to go, forever
    (folder / "build.lock").touch()
    (folder / "exegpt_kernels.so").write_bytes(b"\x7fELF cut short")
    (folder / "exegpt_kernels.sha256").write_text("of another file")
    assert native.load_library().exegpt_append_kv is not None
    built_ns = (folder / "exegpt_kernels.so").stat().st_mtime_ns
    native.load_library.cache_clear()
    native.load_library()
    assert (folder / "exegpt_kernels.so").stat().st_mtime_ns == built_ns  # the second time it is there


@pytest.mark.usefixtures("fresh_build")
def test_ranks_that_start_together_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    builds: list[Path] = []

    def slow_build(library: Path) -> None:
        builds.append(library)
        time.sleep(0.3)  # long enough for every other to arrive
        library.write_bytes(b"built")
        library.with_suffix(".sha256").write_text(native.hashlib.sha256(b"built").hexdigest())

    monkeypatch.setattr(native, "_build", slow_build)
    monkeypatch.setattr(native, "_declare", lambda library: library)
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: path)
    loaded: list[object] = []
    ranks = [
        threading.Thread(target=lambda: loaded.append(native.load_library.__wrapped__())) for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(builds) == 1
    assert loaded == [str(builds[0])] * 4


@pytest.mark.usefixtures("fresh_build")
def test_a_build_that_hangs_elsewhere_is_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_LOCK_TIMEOUT_S", 0.1)
    folder = native.build_folder()
    folder.mkdir(parents=True)
    with (folder / "build.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(native.BuildError, match=r"another process has held .*build\.lock"):
            native.load_library()


@pytest.mark.usefixtures("fresh_build")
def test_cache_that_cannot_be_written_says_which_variable_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(native.BuildError, match="TORCH_EXTENSIONS_DIR"):
        native.load_library()


def test_another_processor_or_source_gets_a_build_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = native.build_folder()
    monkeypatch.setattr(native, "_processor", lambda: "another one")
    assert native.build_folder() != here
