"""Checkpoints that are not what was saved are refused by name, or read as they were; nothing in one is run unasked."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from lightning_autotp import AutoTPStrategy, export_checkpoint
from lightning_autotp.building.checkpoint_reading import (
    CheckpointError,
    DamagedFileError,
    MissingFileError,
    inside,
    read_headers,
)
from lightning_autotp.checkpoints.files import META, consolidate, open_checkpoint, save_directory, save_file
from lightning_autotp.checkpoints.stored import TORCHS_TABLE, HeldTensor, StoredTensor
from lightning_autotp.cli import main
from lightning_autotp.layouts.blocks import Block, whole_box
from lightning_autotp.pretrained.meta_model import meta_model

FLIPS = 200
"""One-bit changes of each file."""

SEED = 20


def checkpoint(step: int, rank: int | None) -> dict[str, Any]:
    """What is saved at a step: what one of two ranks holds, or all of it."""
    generator = torch.Generator().manual_seed(step)

    def half(shape: tuple[int, ...], dim: int) -> Any:
        whole = torch.randn(shape, generator=generator)
        if rank is None:
            return whole
        size = shape[dim] // 2
        box = tuple((rank * size, (rank + 1) * size) if d == dim else (0, n) for d, n in enumerate(shape))
        local = whole.narrow(dim, rank * size, size).clone()
        return HeldTensor(shape, local, [Block(whole_box(local.shape), box, (0,))])

    def one(value: float) -> Any:
        held = [Block((), (), (0,))] if rank == 0 else []
        return torch.tensor(value) if rank is None else HeldTensor((), torch.tensor(value), held)

    return {
        "state_dict": {"rows": half((6, 4), 0), "columns": half((4, 6), 1), "version": 3},
        "optimizer_states": [
            {
                "state": {0: {"exp_avg": half((6, 4), 0), "step": one(step)}},
                "param_groups": [{"params": [0], "param_names": ["rows"], "lr": 0.5}],
            }
        ],
        "epoch": step,
        "notes": "as it was " * 20,
    }


def save_both(rank: int, world_size: int, root: str) -> None:
    for step in (1, 2):
        save_directory(checkpoint(step, rank), Path(root) / f"{step}.dir", dist.group.WORLD)  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """All of a checkpoint, to be compared."""
    if isinstance(value, StoredTensor | torch.Tensor):
        whole = value.read() if isinstance(value, StoredTensor) else value
        return str(whole.dtype), tuple(whole.shape), whole.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def read(path: Path) -> Any:
    return plain(open_checkpoint(path, True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of each kind."""
    root = tmp_path_factory.mktemp("saved")
    run_ranks(save_both, 2, str(root))
    for step in (1, 2):
        save_file(checkpoint(step, None), root / f"{step}.ckpt")
    return root


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "1.dir", tmp_path / "1.dir"))


FILES = [META, TORCHS_TABLE, "__0_0.distcp", "__1_0.distcp"]


def test_what_is_saved_is_read(saved: Path) -> None:
    assert sorted(file.name for file in (saved / "1.dir").iterdir()) == sorted(FILES)
    for step in (1, 2):
        assert read(saved / f"{step}.dir") == read(saved / f"{step}.ckpt") == plain(checkpoint(step, None))


@pytest.mark.parametrize("name", [*FILES, "file"])
def test_a_flipped_bit_is_found_or_means_nothing(saved: Path, folder: Path, name: str) -> None:
    path = folder if name != "file" else Path(shutil.copy(saved / "1.ckpt", folder.parent / "1.ckpt"))
    file = path if name == "file" else path / name
    good, wanted, drawn = file.read_bytes(), read(path), random.Random(SEED)
    errors = []
    for _ in range(FLIPS):
        content = bytearray(good)
        content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        file.write_bytes(content)
        try:
            assert read(path) == wanted
        except CheckpointError as error:
            errors.append(str(error))
    assert all(file.name in error for error in errors)
    # What is between two records of an archive means nothing.
    assert len(errors) == FLIPS if name not in ("file", META) else len(errors) > FLIPS // 20


@pytest.mark.parametrize("name", [*FILES, "file"])
def test_a_file_that_is_cut_or_gone_is_named(saved: Path, folder: Path, name: str) -> None:
    path = folder if name != "file" else Path(shutil.copy(saved / "1.ckpt", folder.parent / "1.ckpt"))
    file = path if name == "file" else path / name
    content, drawn = file.read_bytes(), random.Random(SEED)
    for size in (0, 1, len(content) - 1, *(drawn.randrange(len(content)) for _ in range(20))):
        file.write_bytes(content[:size])
        with pytest.raises(DamagedFileError, match=file.name):
            read(path)
    file.unlink()
    with pytest.raises(MissingFileError, match=file.name):
        read(path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_save_is_refused(saved: Path, folder: Path, name: str) -> None:
    shutil.copy(saved / "2.dir" / name, folder / name)
    with pytest.raises(DamagedFileError, match=r"1\.dir cannot be read: its file .* from another save"):
        read(folder)
    if name in (META, TORCHS_TABLE):  # before anything is read
        with pytest.raises(DamagedFileError):
            open_checkpoint(folder)


def described_anew(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a directory says of its tensors, as a saving program with a fault would have it."""
    rest = torch.load(folder / META, weights_only=True)
    described = json.loads(rest["stored"]["tensors"])
    change(described)
    rest["stored"]["tensors"] = json.dumps(described)
    torch.save(rest, folder / META)


def lacking(described: dict[str, Any]) -> None:
    described["tensors"]["state_dict.columns"]["boxes"].pop()


def overlapping(described: dict[str, Any]) -> None:
    first, second = described["tensors"]["state_dict.columns"]["boxes"]
    second[0] = first[0]


def outside_of_it(described: dict[str, Any]) -> None:
    described["tensors"]["state_dict.columns"]["shape"] = [4, 5]


def huge(described: dict[str, Any]) -> None:
    entry = described["tensors"]["optimizer_states.0.rows.step"]
    entry["shape"], entry["boxes"][0][0] = [10**15], [[0, 10**15]]


def of_another_shape(described: dict[str, Any]) -> None:
    described["tensors"]["state_dict.columns"]["shape"] = [6, 4]
    for number, box in enumerate(described["tensors"]["state_dict.columns"]["boxes"]):
        box[0] = [[3 * number, 3 * number + 3], [0, 4]]


def of_another_dtype(described: dict[str, Any]) -> None:
    described["tensors"]["state_dict.columns"]["dtype"] = "int32"


def no_dtype(described: dict[str, Any]) -> None:
    described["tensors"]["state_dict.columns"]["dtype"] = "load"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lacking, "the parts of state_dict.columns on disk are not all of it, or overlap"),
        (overlapping, "the parts of state_dict.columns on disk are not all of it, or overlap"),
        (outside_of_it, "the parts of state_dict.columns on disk are not all of it, or overlap"),
        (huge, "optimizer_states.0.rows.step does not fit into"),
        (of_another_shape, "state_dict.columns is torch.float32"),
        (of_another_dtype, "state_dict.columns is torch.float32"),
        (no_dtype, "load is no dtype"),
    ],
)  # fmt: skip
def test_what_a_directory_says_of_its_tensors_is_checked(
    folder: Path, change: Callable[[dict[str, Any]], None], expected: str
) -> None:
    described_anew(folder, change)
    with pytest.raises(DamagedFileError, match=expected):
        read(folder)


@pytest.mark.parametrize("how", ["absolute", "above", "link"])
def test_no_file_outside_a_directory_is_read(saved: Path, folder: Path, how: str) -> None:
    shutil.move(folder / "__1_0.distcp", folder.parent / "elsewhere")
    name = {"absolute": str(folder.parent / "elsewhere"), "above": "../elsewhere", "link": "__1_0.distcp"}[how]

    def renamed(described: dict[str, Any]) -> None:
        described["files"][name] = described["files"].pop("__1_0.distcp")
        for entry in described["tensors"].values():
            for box in entry["boxes"]:
                box[1] = box[1].replace("__1_0.distcp", name)

    described_anew(folder, renamed)
    if how == "link":
        (folder / name).symlink_to(folder.parent / "elsewhere")
    with pytest.raises(DamagedFileError, match=r"names the file .*(elsewhere|__1_0\.distcp).*outside the directory"):
        read(folder)


# --- who is trusted ---


class Evil:
    """Makes a directory when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.target,)


def ways_to_read(path: Path, out: Path, *trusting: bool) -> Iterator[Callable[[], Any]]:
    """Everything that opens a checkpoint, as it does unless it is told to run what is in it."""
    weights_only = [not trust for trust in trusting]
    yield lambda: plain(open_checkpoint(path, *weights_only))
    yield lambda: consolidate(path, out / "one.ckpt", *weights_only)
    yield lambda: export_checkpoint(path, out / "exported", **({"weights_only": False} if trusting else {}))


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_directory_is_run(folder: Path, name: str) -> None:
    import pickle

    mark = folder.parent / "ran"
    if name == TORCHS_TABLE:
        (folder / name).write_bytes(pickle.dumps(Evil(mark)))
    elif name == META:
        torch.save({**torch.load(folder / META, weights_only=True), "evil": Evil(mark)}, folder / META)
    else:
        torch.save(Evil(mark), folder / name)
    for way in ways_to_read(folder, folder.parent):
        with pytest.raises(CheckpointError) as refused:
            way()
        assert name in str(refused.value)
    assert not mark.exists()
    if name == META:
        assert "posix.mkdir); nothing else is unpickled" in str(refused.value)
        open_checkpoint(folder, False)
        assert mark.exists()


def test_even_a_table_that_the_directory_vouches_for_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes a directory can make its checksums."""
    mark = folder.parent / "ran"
    content = pickle.dumps(Evil(mark))
    (folder / TORCHS_TABLE).write_bytes(content)
    described_anew(folder, lambda described: described.update(table=hashlib.sha256(content).hexdigest()))
    assert read(folder) == plain(checkpoint(1, None))
    monkeypatch.setattr(sys, "argv", ["lightning-autotp", "consolidate", str(folder), str(folder.parent / "whole")])
    main()
    assert read(folder.parent / "whole") == plain(checkpoint(1, None))
    monkeypatch.setattr(sys, "argv", ["lightning-autotp", "export", str(folder), str(folder.parent / "exported")])
    with pytest.raises(SystemExit, match="does not say which model it is of"):
        main()
    assert not mark.exists()


def test_a_command_runs_a_checkpoint_only_if_it_is_told_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = folder.parent / "ran"
    torch.save({**torch.load(folder / META, weights_only=True), "evil": Evil(mark)}, folder / META)
    words = ["lightning-autotp", "consolidate", str(folder), str(folder.parent / "one.ckpt")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match=r"posix\.mkdir.*--weights-only false"):
        main()
    assert not mark.exists()
    monkeypatch.setattr(sys, "argv", [*words, "--weights-only", "false"])
    main()
    assert mark.exists()


def test_what_a_url_leads_to_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Server(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path))

        def log_message(self, *_: Any) -> None: ...

    mark = tmp_path / "ran"
    torch.save({"state_dict": {}, "evil": Evil(mark)}, tmp_path / "evil.ckpt")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    strategy = AutoTPStrategy()
    monkeypatch.setattr(strategy, "broadcast", lambda value: value)
    monkeypatch.setattr(strategy.saving, "finish", lambda: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/evil.ckpt"
        for weights_only in (None, True):
            with pytest.raises(pickle.UnpicklingError):
                strategy.load_checkpoint(url, weights_only)
        assert not mark.exists()
        strategy.load_checkpoint(url, False)
        assert mark.exists()
        server.shutdown()


# --- archives packed again, and names in an index ---


def packed_again(source: Path, target: Path, compression: int) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    return target


def test_a_compressed_file_is_refused(saved: Path, tmp_path: Path) -> None:
    source = saved / "1.ckpt"
    compressed = packed_again(source, tmp_path / "compressed.ckpt", zipfile.ZIP_DEFLATED)
    for check in (True, False):
        with pytest.raises(DamagedFileError, match=r"compressed\.ckpt was packed again with compression"):
            open_checkpoint(compressed, check=check)
    assert read(packed_again(source, tmp_path / "plain.ckpt", zipfile.ZIP_STORED)) == read(source)
    torch.save({"weight": torch.arange(100.0)}, tmp_path / "weights.bin")
    weights = packed_again(tmp_path / "weights.bin", tmp_path / "pytorch_model.bin", zipfile.ZIP_DEFLATED)
    with pytest.raises(DamagedFileError, match=r"pytorch_model\.bin was packed again with compression"):
        read_headers([str(weights)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files with an index."""
    from exported import tiny_llama

    directory = tmp_path_factory.mktemp("model") / "source"
    tiny_llama(False).save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def build(origin: Any, **options: Any) -> None:
    from transformers import AutoModelForCausalLM

    with meta_model():
        AutoModelForCausalLM.from_pretrained(origin, **options)


@pytest.mark.parametrize("how", ["absolute", "above", "link"])
def test_an_index_cannot_lead_outside(model: Path, tmp_path: Path, how: str) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    build(directory)
    file = min(directory.glob("*.safetensors"))
    elsewhere = Path(shutil.move(file, tmp_path / file.name))
    name = {"absolute": str(elsewhere), "above": f"../{file.name}", "link": file.name}[how]
    if how == "link":
        file.symlink_to(elsewhere)
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(f'"{file.name}"', f'"{name}"'))
    with pytest.raises(DamagedFileError, match=rf"names the file .*{file.name}.*, which is outside the directory"):
        build(directory)


def test_the_links_of_the_hubs_cache_are_followed(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--tiny--llama"
    snapshot = repository / "snapshots" / "abc"
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    for number, file in enumerate(model.iterdir()):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    build(snapshot)
    build("tiny/llama", cache_dir=tmp_path)
    file = min(snapshot.glob("*.safetensors"))
    stolen = Path(shutil.copy(file, tmp_path / "stolen"))
    file.unlink()
    file.symlink_to(stolen)
    for origin in (snapshot, "tiny/llama"):
        with pytest.raises(DamagedFileError, match=r"outside the directory \(it leads to .*stolen\)"):
            build(origin, cache_dir=tmp_path)


def test_a_directory_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "file").touch()
    (tmp_path / "real" / "other").symlink_to("file")
    assert inside(tmp_path / "link", "other") == str(tmp_path / "link" / "other")
