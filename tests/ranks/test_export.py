"""Hugging Face directories: byte for byte what one process writes, one tensor at a time, whole or not at all."""

from __future__ import annotations

import gc
import resource
import shutil
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from converted import Converted, ConvertedConfig, all_operations, conversions, original_tensors
from distributed import run_ranks
from exported import (
    MB,
    TOKENIZER,
    Odd,
    OddConfig,
    assert_same_files,
    contents,
    message,
    tiny_llama,
    weights,
    write_tokenizer,
)
from loading import peak_of
from local_model import cut, local_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Tokenizer,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    conversion_mapping,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import GroupWeightRename, Transpose, WeightConverter

from lightning_autotp import save_pretrained
from lightning_autotp.building.checkpoint_reading import DamagedFileError, MissingFileError
from lightning_autotp.checkpoints.checksums import CHECKSUMS, check_files
from lightning_autotp.checkpoints.files import alone
from lightning_autotp.export import from_model
from lightning_autotp.export.reversal import plan_export, skeleton
from lightning_autotp.export.safetensors_writer import Described, SafetensorsWriter
from lightning_autotp.layouts.ownership import Ownership
from lightning_autotp.layouts.types import Invariant, Layout, Shard
from lightning_autotp.parameters import gathering
from lightning_autotp.ranks.agreement import PeerError
from lightning_autotp.ranks.group import TPGroup

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip


# --- the writer


def every_kind() -> dict[str, Tensor]:
    """Every dtype, in shapes without dims, without elements and with both, under names that JSON must escape."""
    made = {}
    for number, dtype in enumerate(DTYPES):
        generator = torch.Generator().manual_seed(number)
        for shape in ((), (3,), (0, 4), (2, 3, 5)):
            raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
            made[f'{dtype} "{len(shape)}\\{number}é'] = raw.view(dtype).reshape(shape)
    return made


def test_files_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = every_kind()
    names = list(tensors)
    files = {"one": names[::2], "two": names[1::2], "none": []}
    described = {name: Described(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    writer = SafetensorsWriter(tmp_path / "ours", files, described)
    for name in reversed(names):  # in another order than they lie in the files, and in pieces
        writer.write(name, tensors[name].split(1) if tensors[name].dim() else [tensors[name]])
    writer.finish()
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, tmp_path / "theirs" / file, metadata={"format": "pt"})
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


def test_a_writer_knows_what_it_lacks(tmp_path: Path) -> None:
    described = {"a": Described((2, 3), torch.float32), "b": Described((2,), torch.int64)}
    writer = SafetensorsWriter(tmp_path, {"file": ["a", "b"]}, described)
    for wrong in (torch.zeros(2, 2), torch.zeros(2, 4), torch.zeros(2, 3).double()):
        with pytest.raises(RuntimeError, match=r"a is 24 bytes long, but \d+ bytes were given"):
            writer.write("a", [wrong])
    writer.write("a", [torch.full((2, 3), 7.0)])
    with pytest.raises(RuntimeError, match="1 tensors were not written: b"):
        writer.finish()
    writer.write("b", [torch.tensor([1]), torch.tensor([2])])
    writer.finish()
    found = load_file(tmp_path / "file")
    assert torch.equal(found["a"], torch.full((2, 3), 7.0))
    assert found["b"].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"cannot hold tensors of torch.complex128 \(c\)"):
        SafetensorsWriter(tmp_path, {"other": ["c"]}, {"c": Described((1,), torch.complex128)})


def test_a_file_without_room_is_named(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, {"file": ["a"]}, {"a": Described((2**16,), torch.float32)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, before[1]))  # the system refuses to write more to a file
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/file'"):
            writer.write("a", [torch.ones(2**16)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- conversions, undone


def write_planned(model: Any, directory: Path, **options: Any) -> dict[str, set[str]]:
    """Export a model of one process, step by step; the parameters of each tensor that was written."""
    state = model.state_dict(keep_vars=True)
    tensors = {name: (Described(tuple(value.shape), value.dtype), id(value)) for name, value in state.items()}
    original = skeleton(type(model), model.config, tensors)
    if hasattr(model, "_weight_conversions"):
        original._weight_conversions = model._weight_conversions
    plan = plan_export(original, tensors, **{"max_shard_size": "5GB", "save_original_format": True, **options})
    directory.mkdir()
    writer = SafetensorsWriter(directory, plan.files, plan.tensors)
    for step in plan.steps:
        wholes = {parameter.name: state[parameter.name].detach() for parameter in step.parameters}
        for name, pieces in step.pieces(wholes):
            writer.write(name, pieces)
        assert all(parameter.value is None for parameter in step.parameters)
    writer.finish()
    return {name: {parameter.name for parameter in step.parameters} for step in plan.steps for name in step.outputs}


def checkpoint_with(
    entries: list[Any], tensors: dict[str, Tensor], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A directory of a :class:`Converted` whose tensors are converted by these entries."""
    get_checkpoint_conversion_mapping("llama")  # fills the cache, of which a copy is changed
    monkeypatch.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set())
    cache = dict(conversion_mapping._checkpoint_conversion_mapping_cache)
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", cache)
    register_checkpoint_conversion_mapping("Converted", entries)
    ConvertedConfig().save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def reversible() -> list[Any]:
    """All conversions but those that transformers itself cannot undo."""
    kept = [entry for entry in conversions() if not {"turned", "as_it_is"} & set(entry.target_patterns)]
    return [*kept, *(WeightConverter(*names, [Transpose(1, 2)]) for names in TRANSPOSED)]


TRANSPOSED = (("flipped", "turned"), ("straight", "as_it_is"))


def reversible_tensors() -> dict[str, Tensor]:
    tensors = original_tensors()
    return tensors | {"straight": tensors["straight"].transpose(1, 2).contiguous()}


@all_operations
@pytest.mark.parametrize("size", ["5GB", "1KB", 300])
def test_every_operation_of_transformers_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | str
) -> None:
    source = checkpoint_with(reversible(), reversible_tensors(), tmp_path / "source", monkeypatch)
    model, report = Converted.from_pretrained(source, output_loading_info=True)
    assert not any(report.values()), report
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    made_of = write_planned(model, tmp_path / "ours", max_shard_size=size)
    assert weights(tmp_path / "ours") == weights(tmp_path / "theirs")
    assert len(weights(tmp_path / "ours")) > 1 or size == "5GB"
    assert made_of["fused"] == {"gate", "up"}
    assert made_of["qkv"] == {"q_proj", "k_proj", "v_proj"}
    assert made_of["experts.2.w3"] == {"experts_in"}
    assert made_of["mixed.1.a"] == {"text"}  # transformers has both at hand, and needs one of them
    assert made_of["mixed.3.b"] == {"vision"}
    assert made_of.keys() == original_tensors().keys()
    model.save_pretrained(tmp_path / "kept", save_original_format=False)
    write_planned(model, tmp_path / "own names", save_original_format=False)
    assert weights(tmp_path / "own names") == weights(tmp_path / "kept")


@all_operations
def test_a_renaming_that_looks_at_other_names_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the whole state dict tells whether ``long`` is to be renamed: no part of it is enough."""
    entries = [entry for entry in reversible() if not {"long", "embedding"} & set(entry.target_patterns)]
    tensors = reversible_tensors()
    long, short = tensors.pop("joined").split([9, 3])
    tensors |= {"a_guard": tensors.pop("old_embedding"), "long_old": long.clone(), "short": short.clone()}
    entries.append(GroupWeightRename(["a_guard", "long_old"], ["embedding", "long"]))
    source = checkpoint_with(entries, tensors, tmp_path / "source", monkeypatch)
    model, report = Converted.from_pretrained(source, output_loading_info=True)
    assert not any(report.values()), report
    model.save_pretrained(tmp_path / "theirs")
    made_of = write_planned(model, tmp_path / "ours")
    assert weights(tmp_path / "ours") == weights(tmp_path / "theirs")
    assert made_of["long_old"] == {"long"}


# --- two ranks


ODD_LAYOUTS: dict[str, int | None] = {
    "rows": 0, "columns": 1, "scalar": None, "empty": 1, "few": 0, "quantized": None,
}  # fmt: skip


class Wide(PreTrainedModel):
    """Six matrices of 32 MB."""

    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        for number in range(6):
            self.register_parameter(f"matrix{number}", nn.Parameter(torch.full((4096, 2048), number / 7)))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing to do: every tensor comes from the checkpoint."""


def sharded(model: nn.Module, group: TPGroup, dims: dict[str, int | None] | None = None) -> Any:
    """Make a model this rank's part of it."""
    layouts: dict[str, Layout] = {}
    for name, parameter in model.named_parameters():
        dim = dims[name] if dims is not None else 0 if parameter.dim() > 1 else None
        cutting = None if dim is None else Shard(((dim, Ownership.even(parameter.shape[dim], group.size)),))
        layouts[name] = cutting or Invariant()
    return cut(model, group, layouts)


class Watched:
    """Counts the whole tensors that are alive, wherever they are gathered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: list[weakref.ref[Any]] = []
        self.most = self.gathered = 0
        gather = gathering.gather_parameter

        def watched(*args: Any) -> Tensor:
            assert not any(storage() is not None for storage in self.alive), "another one is still here"
            whole = gather(*args)
            self.alive = [weakref.ref(whole)]
            self.gathered += 1
            return whole

        monkeypatch.setattr(gathering, "gather_parameter", watched)


def memory(model: Any, group: TPGroup, directory: Path) -> tuple[int, int, int]:
    """By how much the memory of this process grew while it exported, the largest tensor, and all of them."""
    whole = [parameter.nbytes for parameter in model.parameters()]
    sharded(model, group, {name: 1 if value.dim() > 1 else None for name, value in model.named_parameters()})
    gc.collect()
    _, peak = peak_of(lambda: save_pretrained(model, directory))
    return peak, max(whole), sum(whole)


def two_ranks(rank: int, world_size: int, root: str) -> dict[str, Any]:
    group = TPGroup.of(dist.group.WORLD)
    directory, seen = Path(root), {}
    patch = pytest.MonkeyPatch()
    seen["wide"] = memory(Wide(OddConfig()), group, directory / "wide")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 64}
    mixture = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=8, num_local_experts=8))
    seen["experts"] = memory(mixture, group, directory / "experts")
    del mixture

    for tied in (True, False):
        model = sharded(tiny_llama(tied), group)
        watched = Watched(patch)
        save_pretrained(model, directory / str(tied), max_shard_size="40KB")
        patch.undo()
        seen["gathered", tied] = watched.gathered
        save_pretrained(model, directory / "nothing", write=False)
    save_pretrained(model, directory / "half", dtype=torch.bfloat16)
    save_pretrained(sharded(Odd(OddConfig()), group, ODD_LAYOUTS), directory / "odd")
    save_pretrained(model, directory / "copied", tokenizer=directory / "tokenizer")
    save_pretrained(model, directory / "saved", tokenizer=GPT2Tokenizer.from_pretrained(directory / "tokenizer"))

    # Again into the same directory: what there was is replaced, whether it had more files or fewer.
    for size in ("40KB", "5GB", "90KB"):
        save_pretrained(model, directory / "again", max_shard_size=size)
        if rank == 0:
            seen["again", size] = {file.name for file in (directory / "again").iterdir()}

    # On a disk that becomes full the old export stays as it was, and all ranks hear of it.
    before = contents(directory / "again")
    write = SafetensorsWriter.write

    def full(writer: SafetensorsWriter, name: str, pieces: Iterator[Tensor]) -> None:
        if "layers.1.mlp" in name:
            raise OSError(28, "No space left on device")
        write(writer, name, pieces)

    patch.setattr(SafetensorsWriter, "write", full)
    seen["full"] = message(save_pretrained, model, directory / "again", max_shard_size="50KB")
    seen["full, new"] = message(save_pretrained, model, directory / "never")
    patch.undo()
    dist.barrier()
    seen["kept"] = contents(directory / "again") == before
    if rank == 0:  # an export that was killed
        (directory / "again" / from_model._STAGING).mkdir()
        (directory / "again" / from_model._STAGING / "model-00001-of-00009.safetensors").write_text("half")
    dist.barrier()
    save_pretrained(model, directory / "again", max_shard_size="90KB")
    dist.barrier()
    seen["restored"] = contents(directory / "again") == before

    with alone(directory, directory / "again" / from_model._LOCK) if rank == 0 else nullcontext():
        seen["busy"] = message(save_pretrained, model, directory / "again")
    dist.barrier()
    seen["untouched"] = contents(directory / "again") == before
    dist.barrier()

    if rank == 0:
        (directory / "file").write_text("")
    dist.barrier()
    seen["blocked"] = message(save_pretrained, model, directory / "file" / "x")
    seen["not Hugging Face"] = message(save_pretrained, local_model()[0], directory)
    seen["no tokenizer"] = message(save_pretrained, model, directory / "size", tokenizer=directory / "odd")
    seen["size"] = message(save_pretrained, model, directory / "size", max_shard_size="5 apples")
    patch.setattr(type(model), "get_extra_state", lambda module: {"steps": 3})
    seen["not a tensor"] = message(save_pretrained, model, directory / "state")
    patch.undo()
    return seen


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two ranks write."""
    directory = tmp_path_factory.mktemp("export")
    write_tokenizer(directory / "tokenizer")
    return directory


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[Any, Any]]:
    """What each of two ranks saw."""
    return run_ranks(two_ranks, 2, str(root))


@pytest.mark.parametrize("tied", [True, False])
def test_the_directory_is_what_one_process_writes(ranks: list[dict[Any, Any]], root: Path, tied: bool) -> None:
    original = tiny_llama(tied)
    original.save_pretrained(root / f"{tied} in one process", max_shard_size="40KB")
    assert_same_files(root / str(tied), root / f"{tied} in one process")
    loaded, report = AutoModelForCausalLM.from_pretrained(root / str(tied), output_loading_info=True)
    assert not any(report.values())
    assert len(weights(root / str(tied))) > 3
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert loaded.generation_config.max_new_tokens == 23
    for name, value in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert not (root / "nothing").exists()
    # Every sharded parameter once, one after the other (Watched sees to that), on both ranks.
    assert [seen["gathered", tied] for seen in ranks] == [16 - tied] * 2


@pytest.mark.usefixtures("ranks")
def test_tensors_of_every_kind(root: Path) -> None:
    original = Odd(OddConfig())
    original.save_pretrained(root / "odd in one process")
    assert_same_files(root / "odd", root / "odd in one process")
    assert "ignored" not in load_file(root / "odd" / "model.safetensors")


@pytest.mark.usefixtures("ranks")
def test_written_in_another_dtype(root: Path) -> None:
    tiny_llama(False).bfloat16().save_pretrained(root / "half in one process")
    assert_same_files(root / "half", root / "half in one process")


@pytest.mark.parametrize("case", ["wide", "experts"])
def test_no_rank_has_more_than_one_tensor_whole(ranks: list[dict[Any, Any]], case: str) -> None:
    """One whole tensor, another rank's part of it while it is gathered, and a fixed amount for everything else."""
    for seen in ranks:
        peak, largest, total = seen[case]
        bound = largest + largest // 2 + 32 * MB
        assert bound < total * 3 // 4, "else this proves nothing"
        assert peak < bound


@pytest.mark.usefixtures("ranks")
def test_the_tokenizer_goes_along(root: Path) -> None:
    for name in ("copied", "saved"):
        tokenizer = GPT2Tokenizer.from_pretrained(root / name)
        assert tokenizer("cab").input_ids == [2, 0, 1]
        assert tokenizer.chat_template
    assert {file.name for file in (root / "copied").iterdir()} == TOKENIZER | {
        "config.json", "generation_config.json", "model.safetensors", CHECKSUMS,
    }  # fmt: skip


def test_an_export_replaces_an_earlier_one(ranks: list[dict[Any, Any]], root: Path) -> None:
    seen = ranks[0]
    for size in ("40KB", "90KB"):
        files = sorted(name for name in seen["again", size] if name.endswith(".safetensors"))
        assert len(files) > 1
        assert files == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
        assert "model.safetensors.index.json" in seen["again", size]
    assert "model.safetensors.index.json" not in seen["again", "5GB"]
    assert {name for name in seen["again", "5GB"] if name.endswith("safetensors")} == {"model.safetensors"}
    assert seen["restored"]


def test_two_exports_into_one_directory(ranks: list[dict[Any, Any]], root: Path) -> None:
    assert ranks[0]["busy"].startswith(f"FileExistsError: another run is saving into {root}/again at this moment")
    assert f"FileExistsError: another run is saving into {root}/again at this moment" in ranks[1]["busy"]
    assert all(seen["untouched"] for seen in ranks)


@pytest.mark.usefixtures("ranks")
def test_every_file_has_its_checksum(root: Path, tmp_path: Path) -> None:
    for name in ("True", "copied", "odd", "again"):
        assert check_files(root / name) == len(contents(root / name))
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", CHECKSUMS], cwd=root / name, check=True)
    directory = Path(shutil.copytree(root / "True", tmp_path / "True"))
    for name, content in contents(directory).items():
        changed = bytearray(content)
        changed[len(changed) // 2] ^= 4
        (directory / name).write_bytes(changed)
        with pytest.raises(DamagedFileError, match=rf"\n  changed: {name}\n"):
            check_files(directory)
        (directory / name).unlink()
        with pytest.raises(DamagedFileError, match=rf"\n  missing: {name}\n"):
            check_files(directory)
        (directory / name).write_bytes(content)
    sums = directory / CHECKSUMS
    good = sums.read_bytes()
    for place in range(len(good)):
        sums.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(DamagedFileError):
            check_files(directory)
    lines = good.splitlines(keepends=True)
    weights_at = next(place for place, line in enumerate(lines) if b".safetensors" in line)
    for content in (b"", good[:30], b"".join(lines[:weights_at])):
        sums.write_bytes(content)
        with pytest.raises(DamagedFileError, match=CHECKSUMS):
            check_files(directory)
    sums.write_text(f"{'0' * 64}  ../elsewhere\n")
    with pytest.raises(DamagedFileError, match="outside the directory"):
        check_files(directory)
    sums.unlink()
    with pytest.raises(MissingFileError, match=f"has no {CHECKSUMS}"):
        check_files(directory)


def test_a_failure_leaves_what_there_was(ranks: list[dict[Any, Any]], root: Path) -> None:
    for case in ("full", "full, new"):
        assert ranks[0][case] == "OSError: [Errno 28] No space left on device"
        assert ranks[1][case].startswith("PeerError: rank 0 of 2 failed while writing ")
        assert "No space left on device" in ranks[1][case]
    assert ranks[0]["kept"]
    assert not (root / "never").exists()
    assert "NotADirectoryError" in ranks[0]["blocked"]
    assert f"{PeerError.__name__}: rank 0 of 2 failed while writing" in ranks[1]["blocked"]


def test_what_cannot_be_exported_is_said(ranks: list[dict[Any, Any]], root: Path) -> None:
    assert not (root / "size").exists()
    for seen in ranks:
        assert "TypeError: save_pretrained writes a Hugging Face model, not a Original" in seen["not Hugging Face"]
        assert "ValueError: " in seen["no tokenizer"]
        assert "has none of the files of a tokenizer" in seen["no tokenizer"]
        assert seen["size"].startswith("ValueError: "), seen["size"]
        assert "ValueError: the model's state dict has values that are not tensors" in seen["not a tensor"]
