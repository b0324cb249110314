"""Try the package as it was installed: its command, and the README's program on two processes.

It runs in an environment that has the wheel: see ``make test-wheel``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

import lightning_autotp

DATA = """
ids = torch.randint(0, 101, (8, 16), generator=torch.Generator().manual_seed(0))
dataloader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)


"""


def program(readme: str, model: Path) -> str:
    """The README's first program, with a model that is on the disk, and with data."""
    block = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[0]
    local = re.sub(r'from_pretrained\(".*?"', f'from_pretrained("{model}"', block)
    before, trainer, after = local.partition("L.Trainer(")
    return before + DATA + trainer + after


def main() -> None:
    """Run both, and say what was tried."""
    readme, package = Path(sys.argv[1]).resolve(), Path(lightning_autotp.__file__).resolve()
    if package.is_relative_to(readme.parent / "lightning_autotp"):
        raise SystemExit(f"{package} is the repository's, not the wheel's: run this with python -I")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        config = AutoConfig.for_model(
            "llama",
            vocab_size=101,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        (Path(folder) / "train.py").write_text(program(readme.read_text(), model))
        command = str(Path(sys.executable).with_name("lightning-autotp"))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment.pop("PYTHONPATH", None)
        page = Path(folder) / "plan.html"
        for arguments in (
            [command, "--help"],
            [command, "plan", str(model), "--html", str(page)],
            [sys.executable, "train.py"],
        ):
            done = subprocess.run(
                arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
            if done.returncode or ("and proved that" in done.stderr + done.stdout) != ("train.py" in arguments):
                raise SystemExit(f"{arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        if not page.is_file():
            raise SystemExit("lightning-autotp plan --html has written no page")
    print(f"{package.parent}: the command and the README's program on two processes, as they should be")


if __name__ == "__main__":
    main()
