"""Shared by all tests: where things are, and a cache of their own. Nothing is fetched from a hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from exegpt.settings import Job

REPOSITORY = Path(__file__).resolve().parent.parent

# Before transformers is imported anywhere: it reads this once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run every case of tests marked sweep, not one in three"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the many cases of a test marked `sweep` run every third, unless asked for all."""
    if config.getoption("--full"):
        return
    seen: dict[str, int] = {}
    left_out = []
    for item in items:
        if item.get_closest_marker("sweep"):
            name = item.nodeid.partition("[")[0]
            seen[name] = seen.get(name, 0) + 1
            if seen[name] % 3 != 1:
                left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        kept = set(items) - set(left_out)
        items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the clone."""
    return REPOSITORY


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Directory of public traces and measured tables; skips where it is absent."""
    path = Path(os.environ.get("EXEGPT_DATA", REPOSITORY.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no public data at {path}; EXEGPT_DATA names its place")
    return path


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache of profiles and downloads for this run of the tests, unless EXEGPT_CACHE names one."""
    if "EXEGPT_CACHE" not in os.environ:
        os.environ["EXEGPT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    return Path(os.environ["EXEGPT_CACHE"])


@pytest.fixture
def compose_config() -> Callable[..., DictConfig]:
    """`compose_config(*overrides)` composes `conf/` as launch.py does."""
    from hydra import compose, initialize_config_dir

    from exegpt.config import register

    def composed(*overrides: str) -> DictConfig:
        register()
        with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
            return compose("config", overrides=list(overrides))

    return composed


@pytest.fixture
def compose_job(compose_config: Callable[..., DictConfig]) -> Callable[..., Job]:
    """`compose_job(*overrides)` composes and converts to a checked job."""
    from exegpt.config import to_job

    return lambda *overrides: to_job(compose_config(*overrides))
