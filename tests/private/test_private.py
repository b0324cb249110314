"""What the package uses of other libraries' private API: all of it is in one folder, and does what is relied on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import pytest
from canaries import CANARIES, sing
from private_names import offered, private_uses, shadowed, symbols
from torch import nn

PACKAGE = Path(__file__).parents[2] / "lightning_autotp"
PRIVATE = PACKAGE / "private"

for file in sorted(Path(__file__).parent.glob("canaries_of_*.py")):
    pytest.register_assert_rewrite(file.stem)
    import_module(file.stem)


@pytest.mark.parametrize("name", CANARIES)
def test_canary(name: str) -> None:
    sing(name, CANARIES[name])


@pytest.mark.parametrize("name", ["torch._gone.thing", "torch.nn.Module._gone", "transformers.utils.GONE"])
def test_what_is_gone_is_named(name: str) -> None:
    library = name.partition(".")[0]
    with pytest.raises(pytest.fail.Exception, match=rf"(?s){re.escape(name)} is gone from {library} \d.*/private"):
        sing(name, lambda _: nn.Module()._gone)


# --- the guard: nothing private is used elsewhere ---

FILES = sorted(file for file in PACKAGE.rglob("*.py") if PRIVATE not in file.parents)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_private_is_used_elsewhere(file: Path) -> None:
    """What a library keeps to itself is imported, or wrapped, in lightning_autotp/private."""
    assert [f"{file}:{line}: {text}" for line, text in private_uses(file.read_text(), CANARIES.keys())] == []
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    assert list(shadowed(import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts)))) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from torch._subclasses.fake_tensor import FakeTensor", "torch._subclasses.fake_tensor.FakeTensor"),
        ("def f():\n    from torch.utils import _pytree as pytree", "torch.utils._pytree"),
        ("from transformers.utils import PROCESSOR_NAME", "transformers.utils.PROCESSOR_NAME"),
        ("import torch._dynamo", "torch._dynamo"),
        ("from lightning.fabric import _graveyard as grave", "lightning.fabric._graveyard"),
        ("torch._C.DispatchKey", "torch._C"),
        ("torch.ops._c10d_functional.wait_tensor(x)", "torch.ops._c10d_functional"),
        ("module._parameters['weight']", "module._parameters"),
        ("class A:\n    def _modules(self): ...\nmodule._modules", "module._modules"),
        ("trainer.fit_loop._data_source = 1", "trainer.fit_loop._data_source"),
        ("self._strategy.setup()", "self._strategy"),
        ("super()._configure_launcher()", "super()._configure_launcher"),
        ("getattr(model, '_weight_conversions', None)", "'_weight_conversions'"),
        ("vars(callback).pop('_summary')", "'_summary'"),
        ("getter = ['_is_view']", "'_is_view'"),
        ("logging.getLogger('torch._dynamo.guards')", "'torch._dynamo.guards'"),
        ("Mode.__init__(self, _dispatch_key=key)", "_dispatch_key="),
    ],
)  # fmt: skip
def test_the_guard_finds(line: str, found: str) -> None:
    assert found in [text for _, text in private_uses(line, CANARIES.keys())]


def test_the_guard_finds_what_a_class_takes_from_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text(
        "from lightning.pytorch.strategies import ModelParallelStrategy\n"
        "class Mine(ModelParallelStrategy):\n"
        "    def _configure_launcher(self): ...\n"
        "    def setup(self, trainer):\n"
        "        self._device_mesh = self._own = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert list(shadowed(import_module("planted"))) == [
        "Mine._configure_launcher is ModelParallelStrategy's",
        "Mine._device_mesh is ModelParallelStrategy's",
        "Mine._configure_launcher is Strategy's",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "self._own = 1\nother._own",
        "import sys\nsys._getframe(1)",
        "type(value)._fields",
        "from lightning_autotp.building.recorder import _trim",
        "'_norm' + '_total'",
        "'''Of torch._C.'''",
        "torch.nn.Module.__init__(self)",
    ],
)
def test_the_guard_lets_be(line: str) -> None:
    assert list(private_uses(line, CANARIES.keys())) == []


# --- what is in the folder has a canary, and is used ---


MODULES = sorted(PRIVATE.glob("*_private.py"))


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.stem)
def test_every_symbol_has_a_canary(file: Path) -> None:
    parts = {part for name in CANARIES for part in name.split(".")}
    assert symbols(file)
    assert [name for name in symbols(file) if name not in (CANARIES if "." in name else parts)] == []


def words(files: Iterable[Path]) -> set[str]:
    return {word for file in files for word in re.findall(r"\w+", file.read_text())}


def test_every_canary_is_for_something_that_is_used() -> None:
    used = words(PACKAGE.rglob("*.py"))
    assert [name for name in CANARIES if name.split(".")[-1] not in used] == []


def test_everything_in_the_folder_is_used() -> None:
    used = words(FILES)
    for file in MODULES:
        often = Counter(re.findall(r"\w+", file.read_text()))
        others = used | words(other for other in MODULES if other != file)
        assert {name for name in offered(file) - others if often[name] == 1} == set()
