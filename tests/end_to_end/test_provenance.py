"""Where an operator comes from is told by the packages' own directories, whatever the paths around them are called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from distributed import PATIENCE, SCRIPT_ENVIRONMENT
from tiny import meta_model
from torch import nn

import lightning_autotp
from lightning_autotp.capture.capture import CaptureError, capture
from lightning_autotp.pipeline import make_plan

SCRIPT = """
import json
import torch, transformers, lightning_autotp
from tiny import meta_model
from lightning_autotp.capture.capture import capture
from lightning_autotp.pipeline import make_plan

print("FOUND", json.dumps({
    "files": [module.__file__ for module in (torch, transformers, lightning_autotp)],
    "sources": [operator.source for operator in capture(meta_model("llama")).operators],
    "plan": make_plan(meta_model("gpt2"), 2)[0].to_json(),
}))
"""


@pytest.mark.nightly
def test_a_checkout_with_its_environment_inside(tmp_path: Path) -> None:
    """All of a program's paths contain the package's name, and torch's contain ``/torch/`` twice."""
    checkout = tmp_path / "torch" / "lightning_autotp"
    libraries = checkout / ".venv/lib/python/site-packages"
    libraries.mkdir(parents=True)
    for module in (torch, transformers):
        for entry in Path(module.__file__).parent.parent.iterdir():
            if not (libraries / entry.name).exists():
                (libraries / entry.name).symlink_to(entry)
    (checkout / "lightning_autotp").symlink_to(Path(lightning_autotp.__file__).parent)
    (checkout / "tests").symlink_to(Path(__file__).parents[1])
    paths = os.pathsep.join(map(str, (checkout, checkout / "tests" / "support", libraries)))
    done = subprocess.run(
        [sys.executable, "-S", "-c", SCRIPT],  # without the environment that the tests themselves run in
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=tmp_path,
        env={**os.environ, **SCRIPT_ENVIRONMENT, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.split("FOUND")[1])
    assert [Path(file).parent.parent for file in found["files"]] == [libraries, libraries, checkout]

    sources = [operator.source for operator in capture(meta_model("llama")).operators]
    assert found["sources"] == sources
    lines = {source for source in sources if source.startswith("modeling_llama.py:")}
    assert len(lines) > 20
    assert not [source for source in sources if source.startswith(("<string>", Path(__file__).name))]
    assert found["plan"] == make_plan(meta_model("gpt2"), 2)[0].to_json()


OWN_MODULE = """\
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, broken=False):
        hidden = torch.relu(self.up(x))
        if broken:
            hidden = hidden.view(-1, 7)
        return self.down(hidden) * 2
"""


@pytest.fixture(params=["torch/overrides", "torch/nn/blocks", "transformers/utils/blocks", "lightning_autotp/blocks"])
def own(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    """A user's own module, in a file whose path looks like one of a library's."""
    path = (tmp_path / request.param).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(path.parent)
    yield import_module(path.stem).Own()
    del sys.modules[path.stem]


def test_a_module_in_a_directory_named_like_a_library(own: nn.Module) -> None:
    file = Path(sys.modules[type(own).__module__].__file__ or "").name
    graph = capture(own, torch.zeros(3, 6))
    sources = {operator.name: operator.source for operator in graph.operators if not operator.boundary}
    assert sources == {
        "aten.linear.default": f"{file}:13: return self.down(hidden) * 2",
        "aten.relu.default": f"{file}:10: hidden = torch.relu(self.up(x))",
        "aten.mul.Tensor": f"{file}:13: return self.down(hidden) * 2",
    }
    with pytest.raises(CaptureError, match=rf"{file}:12 in forward"):
        capture(own, (torch.zeros(3, 6), True))
