"""Imported profiles, kept: reading public tables takes seconds, reading the finished profile does not."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from exegpt import __version__
from exegpt.errors import ProfileError
from exegpt.profiler.imports.aiconfigurator import aiconfigurator_profile
from exegpt.profiler.imports.columns import SUFFIXES
from exegpt.profiler.imports.llmservingsim import llmservingsim_profile
from exegpt.profiler.imports.vidur import vidur_profile
from exegpt.profiler.sheet import GpuSheet, sheet_names
from exegpt.profiler.table import VERSION, ProfileTable, read_profile, shape_digest, write_profile
from exegpt.settings import ProfileSource
from exegpt.specs import Dtype, ModelSpec

# Raised whenever an importer reads the same tables into other numbers.
IMPORT_VERSION = 3

# Tables that the importers read; whatever else lies beside them does not change a profile.
_STEMS = {
    ProfileSource.vidur: ("mlp", "attention", "all_reduce", "send_recv"),
    ProfileSource.aiconfigurator: (
        "gemm_perf",
        "context_attention_perf",
        "generation_attention_perf",
        "nccl_perf",
    ),
    ProfileSource.llmservingsim: ("dense", "per_sequence", "attention", "layers"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Which tables to read, for what.

    Attributes
    ----------
    source : ProfileSource
        One of the imports.
    directory : Path
        Of its tables.
    model : ModelSpec
    sheet : GpuSheet, optional
        Its formulas fill in what the tables lack.
    dtype : Dtype
    gpus_per_node, num_ranks : int
        GPUs of a node, and of the cluster.
    device : str
        As the cluster names its GPUs.
    network : Path, optional
        Vidur's tables of collectives.
    same_shape : bool
        LLMServingSim's folder has the model's shape, whatever its name.
    """

    source: ProfileSource
    directory: Path
    model: ModelSpec
    sheet: GpuSheet | None
    dtype: Dtype
    gpus_per_node: int
    num_ranks: int
    device: str
    network: Path | None = None
    same_shape: bool = False

    def digest(self) -> str:
        """Digest of everything that the profile depends on, the content of the tables included."""
        values = {
            "versions": [__version__, IMPORT_VERSION, VERSION],
            "source": self.source.value,
            "tables": _digests(self.directory, _STEMS[self.source]),
            "network": None if self.network is None else _digests(self.network, _STEMS[self.source]),
            "model": [self.model.name, shape_digest(self.model)],
            "sheet": None if self.sheet is None else asdict(self.sheet),
            "for": [self.dtype.value, self.gpus_per_node, self.num_ranks, self.device, self.same_shape],
        }
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _digests(directory: Path, stems: Sequence[str]) -> dict[str, str]:
    found = {}
    for path in sorted(p for suffix in SUFFIXES for p in directory.rglob(f"*{suffix}")):
        if path.name.startswith(tuple(stems)):
            found[str(path.relative_to(directory))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def imported_profile(wanted: Import, cache_dir: Path, *, refresh: bool = False) -> tuple[ProfileTable, Path]:
    """The profile of published tables, from the cache where the same tables were read before.

    Parameters
    ----------
    wanted : Import
    cache_dir : Path
        Profiles are kept in its folder `profiles`.
    refresh : bool
        Read the tables although the cache has their profile.

    Returns
    -------
    ProfileTable, Path
        And where it is kept.

    Raises
    ------
    ProfileError
        If the tables are damaged, foreign, or lack what no formula may fill in.
    """
    check_model(wanted.model, wanted.source)
    check_folder(wanted.directory, wanted.sheet)
    if wanted.network is not None and not wanted.network.is_dir():
        raise ProfileError(
            f"profile.network={wanted.network}: no such directory; name one that holds all_reduce.csv and "
            "send_recv.csv, or null for the sheet's formula"
        )
    name = f"{wanted.model.name}-{wanted.source.value}-{wanted.digest()}.json"
    path = cache_dir / "profiles" / name
    if path.exists() and not refresh:
        return read_profile(path), path
    try:
        table = _read(wanted)
    except ProfileError as error:
        said = str(error).removeprefix(f"{wanted.directory}: ")
        raise ProfileError(f"profile.path={wanted.directory}: {said}") from error
    write_profile(table, path)
    return table, path


def check_model(model: ModelSpec, source: ProfileSource) -> None:
    """ProfileError for models whose layers no published table measures whole."""
    kind = "an encoder-decoder model" if model.is_encoder_decoder else "a model with experts"
    if model.is_encoder_decoder or model.num_experts:
        raise ProfileError(
            f"profile.source={source.value}: its tables are of dense decoder-only models, and {model.name} "
            f"is {kind}; use profile.source=analytic"
        )


def check_folder(directory: Path, sheet: GpuSheet | None) -> None:
    """ProfileError if a folder in the path is named as another card: not all tables say their own."""
    if sheet is None or sheet.name not in sheet_names():
        return
    for folder in reversed(directory.resolve().parts):
        plain = re.sub(r"[^a-z0-9]", "", folder.lower())
        # a100 stands for a100-40 and a100-80.
        cards = [name for name in sheet_names() if plain in (name.replace("-", ""), name.partition("-")[0])]
        if cards and sheet.name not in cards:
            raise ProfileError(
                f"profile.path={directory}: its tables are of {' or '.join(cards)}, by the folder {folder}, "
                f"but cluster.gpu is {sheet.name}; set cluster.gpu to the card of the tables, or name others"
            )


def _read(wanted: Import) -> ProfileTable:
    match wanted.source:
        case ProfileSource.vidur:
            return vidur_profile(
                wanted.directory,
                wanted.model,
                wanted.sheet,
                network=wanted.network,
                gpus_per_node=wanted.gpus_per_node,
                dtype=wanted.dtype,
                num_ranks=wanted.num_ranks,
                device=wanted.device,
            )
        case ProfileSource.aiconfigurator:
            return aiconfigurator_profile(
                wanted.directory,
                wanted.model,
                wanted.sheet,
                tp_sizes=wanted.model.tp_sizes(wanted.gpus_per_node),
                gpus_per_node=wanted.gpus_per_node,
                dtype=wanted.dtype,
                num_ranks=wanted.num_ranks,
                device=wanted.device,
            )
        case ProfileSource.llmservingsim:
            return llmservingsim_profile(
                wanted.directory,
                wanted.model,
                wanted.sheet,
                same_shape=wanted.same_shape,
                gpus_per_node=wanted.gpus_per_node,
                dtype=wanted.dtype,
                num_ranks=wanted.num_ranks,
                device=wanted.device,
            )
    raise AssertionError(f"{wanted.source} reads no tables")
