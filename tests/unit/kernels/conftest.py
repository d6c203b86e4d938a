"""A build folder of the session's own, and one kernel backend at a time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from exegpt.kernels import native, selection


@pytest.fixture(scope="session")
def build_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extensions")


@pytest.fixture(autouse=True)
def own_build_root(build_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test writes to the user's cache, and none inherits another's choice."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(build_root))
    monkeypatch.delenv(selection.VARIABLE, raising=False)
    yield
    selection.set_backend(None)


@pytest.fixture
def fresh_build() -> Iterator[None]:
    """Forget what was built, before and after a test that breaks the build."""
    caches = (native.load_library, selection._library_if_it_builds, selection.announce_reference)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(params=selection.BACKENDS)
def each_backend(request: pytest.FixtureRequest) -> str:
    try:
        selection.set_backend(request.param)
    except native.BuildError as error:
        pytest.skip(str(error))
    return str(request.param)
