"""A model so small that a job takes seconds, and jobs as subprocesses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAUNCH = Path(__file__).resolve().parents[2] / "launch.py"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 300,
}
# Two CPU workers wherever the tests run. Seconds of measuring are enough for small batches.
MODEL = (
    "model=hf",
    "model.path={model}",
    "model.name=tiny",
    "model.weights=random",
    "cluster.device=cpu",
    "cluster.gpus_per_node=2",
    "profile.budget_s=12",
    "seed=1",
)
# Lengths and a search space that such a profile covers.
FIXED = (
    "workload=fixed",
    "workload.num_requests=8",
    "workload.input_tokens=16",
    "workload.output_tokens=6",
    "solver.max_encode_batch_size=4",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A job that ended: exit code, what it wrote, and where."""

    code: int
    out: str
    err: str
    cwd: Path

    @property
    def output_dirs(self) -> list[Path]:
        """Directories that jobs made, by time."""
        return sorted(path for path in (self.cwd / "outputs").glob("*") if path.name != "sweeps")

    @property
    def output_dir(self) -> Path:
        """The only one."""
        (directory,) = self.output_dirs
        return directory

    @property
    def result(self) -> Any:
        """Its result.json, read as strict JSON."""

        def refuse(constant: str) -> None:
            raise ValueError(f"{constant} is no JSON")

        return json.loads((self.output_dir / "result.json").read_text(), parse_constant=refuse)

    @property
    def complaints(self) -> list[str]:
        """Lines of stderr that are neither log lines (`[time][logger][level] ...`) nor progress bars."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        return [line for line in lines if not line.startswith("[2") and "\u2501" not in line]

    def succeeded(self) -> Finished:
        """Itself, once it is sure that the job ended well."""
        assert self.code == 0, f"{self.err}\n{self.out}"
        assert "Traceback" not in self.err
        return self


Start = Callable[..., Finished]


def environment(**changes: str) -> dict[str, str]:
    """Environment of a user's shell; the interpreter's own directory is not in its PATH."""
    own = str(Path(sys.executable).parent)
    path = [entry for entry in os.environ["PATH"].split(os.pathsep) if entry != own]
    return {**os.environ, "PATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **changes}


def start(command: Sequence[str | Path], cwd: Path, **changes: str) -> Finished:
    """Run a command in its own session, so that nothing of it outlives a test that fails."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=240)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return Finished(code=process.returncode, out=out, err=err, cwd=cwd)


def launch(cwd: Path, *overrides: str | Path, **changes: str) -> Finished:
    """`python launch.py [overrides]` in `cwd`."""
    return start([sys.executable, LAUNCH, *overrides], cwd, **changes)


def weights() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Seeded weights of the tiny model, by Hugging Face's names."""
    rng = np.random.default_rng(7)
    h, ff, kv = 32, 64, 16
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (300, h), "model.norm.weight": (h,)}
    for index in range(2):
        layer = {
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_proj": (h, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, h),
            "mlp.gate_proj": (ff, h),
            "mlp.up_proj": (ff, h),
            "mlp.down_proj": (h, ff),
        }
        sizes |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
    return {name: rng.normal(0, 0.2, size).astype(np.float32) for name, size in sizes.items()}


def write_gguf(path: Path) -> None:
    """The tiny model's metadata and its first tensor as GGUF."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(300)
    writer.add_tensor("token_embd.weight", np.zeros((300, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
