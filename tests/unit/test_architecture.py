"""Who may import whom (the layout in the README): read from the source, and checked in fresh interpreters."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = {"exegpt": REPOSITORY / "exegpt", "exegpt.kernels": REPOSITORY / "kernels"}

HEAVY = {"torch", "deepspeed", "hydra", "omegaconf", "transformers"}
HYDRA = {"hydra", "omegaconf"}
KNOWS_HYDRA = {"exegpt.config", "launch"}

# Room -> rooms it may import, itself always. Top-level files are the room "base" unless named here.
BASE = {"base"}
PLANNING = BASE | {"workload", "profiler", "policies", "simulator"}
ALLOWED = {
    "base": BASE,
    "config": BASE,
    "workload": BASE,
    "profiler": BASE | {"workload"},
    "policies": BASE | {"workload", "profiler"},
    "simulator": PLANNING,
    "scheduler": PLANNING,
    "report": PLANNING | {"scheduler"},
    "runtime": PLANNING | {"report"},
    "entry": PLANNING | {"config", "scheduler", "report", "runtime"},
}
CONFIG_FILES = {"config", "config_help", "schemas"}
ENTRY_FILES = {"commands", "main", "__main__"}
# What computes with torch: the ranks, their kernels, and the measuring half of the profiler.
RUNTIME = (
    "exegpt.runner",
    "exegpt.kernels",
    "exegpt.profiler.measure",
    "exegpt.profiler.bench",
    "exegpt.profiler.stopwatch",
)


def modules() -> dict[str, Path]:
    """Every module of the package as it is installed, and its file."""
    found = {"launch": REPOSITORY / "launch.py"} if (REPOSITORY / "launch.py").exists() else {}
    for package, root in ROOTS.items():
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((package, *parts))] = path
    return found


def room_of(module: str) -> str:
    """The room that a module stands in."""
    if module.startswith(RUNTIME):
        return "runtime"
    if module == "launch":
        return "entry"
    top = module.split(".")[1] if "." in module else ""
    if top in CONFIG_FILES:
        return "config"
    if top in ENTRY_FILES:
        return "entry"
    return top if (REPOSITORY / "exegpt" / top).is_dir() and top else "base"


def imports_of(module: str, path: Path) -> Iterator[str]:
    """Every module that `path` imports, those inside functions too; names may be attributes."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


MODULES = modules()
PURE = {name: room_of(name) for name in MODULES if room_of(name) not in ("runtime", "config", "entry")}


def test_the_rules_see_the_package() -> None:
    assert {"exegpt", "exegpt.specs", "exegpt.policies.base", "exegpt.config"} <= set(MODULES)
    assert room_of("exegpt.profiler.table") == "profiler"
    assert room_of("exegpt.profiler.measure") == "runtime"
    assert room_of("exegpt.config_help") == "config"
    assert room_of("exegpt.specs") == room_of("exegpt") == "base"


def test_relative_and_inner_imports_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "b.py"
    path.write_text("from . import c\nfrom ..errors import E\ndef f():\n    import torch.nn\n")
    assert set(imports_of("exegpt.a.b", path)) == {"exegpt.a.c", "exegpt.errors.E", "torch.nn"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_direction(module: str) -> None:
    room = room_of(module)
    assert room in ALLOWED, f"{module} stands in a room without a place in ALLOWED"
    for name in imports_of(module, MODULES[module]):
        if name.split(".")[0] != "exegpt":
            continue
        target = name if name in MODULES else name.rpartition(".")[0]
        if target in ("", "exegpt"):
            continue
        other = room_of(target)
        assert other == room or other in ALLOWED[room], f"{module} ({room}) imports {target} ({other})"


@pytest.mark.parametrize("module", MODULES)
def test_only_the_configuration_knows_hydra(module: str) -> None:
    libraries = {name.split(".")[0] for name in imports_of(module, MODULES[module])}
    assert module in KNOWS_HYDRA or not libraries & HYDRA


@pytest.mark.parametrize("module", PURE)
def test_pure_module_names_nothing_heavy(module: str) -> None:
    libraries = {name.split(".")[0] for name in imports_of(module, MODULES[module])}
    assert not libraries & HEAVY


@pytest.mark.parametrize("room", sorted(set(PURE.values())))
def test_pure_modules_stay_light(room: str) -> None:
    """Import each module of a room in a fresh interpreter and see what it pulled in."""
    names = [name for name in PURE if PURE[name] == room]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = {HEAVY!r} & set(sys.modules)\n"
        "    assert not heavy, f'{name} pulls in {sorted(heavy)}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_folders_of_the_clone_shadow_no_library() -> None:
    """With the clone on the path, as in `python launch.py`, transformers takes kernels/ for a hub package."""
    code = (
        "from transformers.utils.import_utils import is_kernels_available\n"
        "assert not is_kernels_available()\n"
        "from transformers import LlamaForCausalLM\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
