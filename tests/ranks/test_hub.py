"""Models from the Hub: fetched once for all ranks of a machine, the same weights as in one process, errors on all."""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from distributed import run_ranks
from hub_server import TOKEN, Hub, Repository, hub
from huggingface_hub import constants
from loading import assert_local_part, localize
from saved_models import rewritten, save
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import hub as of_transformers

from lightning_autotp.loading.parameters import load_parameters
from lightning_autotp.pretrained.hub import cached_files_once
from lightning_autotp.pretrained.meta_model import meta_model
from lightning_autotp.ranks.agreement import PeerError
from lightning_autotp.ranks.peers import Peer


def use(address: str, cache: Path, offline: bool = False) -> None:
    """What HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE do in a process that starts."""
    constants.ENDPOINT = address
    constants.HUGGINGFACE_CO_URL_TEMPLATE = address + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_CACHE = str(cache)
    constants.HF_HUB_OFFLINE = offline
    constants.DOWNLOAD_CHUNK_SIZE = 1000  # of these, none is fetched twice
    of_transformers.hf_api().endpoint = address


def built(repository: str, **arguments: Any) -> nn.Module:
    with meta_model():
        model: nn.Module = AutoModelForCausalLM.from_pretrained(repository, **arguments)
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


def same_as(directory: Path, repository: str, cache: Path, **arguments: Any) -> str:
    """Load this rank's part of a model and compare it with the whole; returns the snapshot's directory."""
    model = built(repository, **arguments)
    source = model.autotp_source
    assert source.origin == repository
    snapshot = cache / f"models--{repository.replace('/', '--')}" / "snapshots"
    assert all(Path(file).is_relative_to(snapshot) for file in source.files)
    localize(model, dist.get_rank(), dist.get_world_size())
    load_parameters(model)
    places = {name: value for name, value in arguments.items() if name in ("subfolder", "variant")}
    whole = AutoModelForCausalLM.from_pretrained(directory, **places)
    assert_local_part(model, whole)
    return Path(source.files[0]).relative_to(snapshot).parts[0]


def refused(repository: str, **arguments: Any) -> str:
    """The error of ``from_pretrained``, which is of the same type everywhere."""
    before = of_transformers.cached_files
    with pytest.raises(OSError) as caught:  # noqa: PT011
        built(repository, **arguments)
    assert of_transformers.cached_files is before
    return f"{type(caught.value).__name__}: {caught.value}"


def load_everything(rank: int, ranks: int, address: str, folder: Path) -> dict[str, Any]:
    cache = folder / "cache"
    use(address, cache)
    result: dict[str, Any] = {}
    same_as(folder / "first", "checks/plain", cache)
    result["v1"] = same_as(folder / "second", "checks/plain", cache, revision="v1")
    own_cache = folder / "another cache"
    same_as(folder / "inner", "checks/inner", own_cache, subfolder="sub", variant="v", cache_dir=own_cache)
    same_as(folder / "first", "checks/private", cache, token=TOKEN)
    same_as(folder / "first", "checks/cut", cache)
    for name, arguments in {
        "none": {},
        "private": {"cache_dir": folder / "empty"},
        "gated": {},
        "plain": {"revision": "v9"},
        "reset": {},
        "variant": {"subfolder": "sub", "variant": "other"},
    }.items():
        result[name] = refused(f"checks/{name}", **arguments)
    result["missing"] = refused("./checks/missing")
    dist.barrier()
    if rank == 1:  # a call that only one rank makes waits for nobody
        same_as(folder / "first", "checks/alone", cache)
    dist.barrier()
    # Without a server: what is cached is enough, and nothing is asked offline.
    use("http://127.0.0.1:1", cache)
    sleep = time.sleep
    with mock.patch("time.sleep", lambda seconds: sleep(min(seconds, 0.05))):  # between attempts
        result["gone"] = refused("checks/gone")
        same_as(folder / "first", "checks/plain", cache)
    use(address, cache, offline=True)
    same_as(folder / "first", "checks/plain", cache)
    same_as(folder / "second", "checks/plain", cache, revision="v1")
    result["offline"] = refused("checks/gone")
    use(address, cache)
    same_as(folder / "first", "checks/plain", cache, local_files_only=True)
    return result


@pytest.mark.parametrize("path", ["./missing", "/missing", "a/path/missing", "missing/", "~/missing"])
def test_a_path_where_there_is_nothing_is_not_asked_of_the_hub(path: str) -> None:
    for nested in nullcontext(), meta_model():
        with nested, mock.patch("socket.socket.connect", side_effect=AssertionError("asked")):
            assert refused(path).startswith(f"FileNotFoundError: {path} does not exist: as seen from {Path.cwd()}")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    save("Llama", tmp_path / "first")
    rewritten(tmp_path / "first", tmp_path / "second", lambda tensors: [value.mul_(2) for value in tensors.values()])
    (tmp_path / "inner").mkdir()
    inner = rewritten(tmp_path / "first", tmp_path / "inner" / "sub", lambda tensors: None)
    (inner / "model.safetensors").rename(inner / "model.v.safetensors")
    return tmp_path


def counted(server: Hub, repository: str) -> Counter[tuple[str, str]]:
    return Counter((request.method, request.path) for request in server.of(repository))


def test_one_process_fetches_for_all(models: Path) -> None:
    first, second = models / "first", models / "second"
    with hub() as server:
        server.repositories |= {
            "checks/plain": Repository({"main": first, "v1": second}),
            "checks/inner": Repository({"main": models / "inner"}),
            "checks/variant": Repository({"main": models / "inner"}),
            "checks/private": Repository({"main": first}, access="private"),
            "checks/gated": Repository({"main": first}, access="gated"),
            "checks/cut": Repository({"main": first}, fault="cut"),
            "checks/reset": Repository({"main": second}, fault="reset"),
            "checks/alone": Repository({"main": first}),
        }
        one, other = run_ranks(load_everything, 2, server.address, models)
    assert one == other, "ranks differ"
    plain = server.repositories["checks/plain"]
    assert one["v1"] == plain.commit("v1")
    for repository in ("checks/plain", "checks/inner", "checks/alone"):
        twice = {request: times for request, times in counted(server, repository).items() if times > 1}
        assert not twice, twice
    for file in first.iterdir():
        kind = "blob" if file.suffix == ".safetensors" else "resolve"
        assert counted(server, "checks/plain")["GET", f"/checks/plain/{kind}/{plain.commit('main')}/{file.name}"] <= 1
    fetched = {path.rpartition("/")[2] for method, path in counted(server, "checks/plain") if method == "GET"}
    assert {file.name for file in first.glob("*.safetensors")} < fetched
    assert {request.token for request in server.of("checks/private")} == {None, f"Bearer {TOKEN}"}
    assert {request.token for request in server.of("checks/plain")} == {None}
    assert TOKEN not in str(one)

    ranges = [request.range for request in server.of("checks/cut") if request.range is not None]
    assert len(ranges) == 2
    assert all(not given.startswith("bytes=0-") for given in ranges)

    for name, said in {
        "none": "checks/none is not a local folder and is not a valid model identifier.*pass a token",
        "private": "checks/private is not a local folder.*hf auth login",
        "gated": "gated repo.*Make sure to have access to it",
        "plain": "v9 is not a valid git identifier.*for available revisions",
        "reset": "fetching model.safetensors of checks/reset failed: ReadError.*start again",
        "variant": "model.other.safetensors",
        "gone": "couldn't connect to 'http://127.0.0.1.*Check your internet connection",
        "missing": "^FileNotFoundError: ./checks/missing does not exist",
        "offline": "couldn't find them in the cached files",
    }.items():
        assert re.search(said, one[name], re.DOTALL), f"{name}: {one[name]}"


def test_machines_agree_on_a_commit(models: Path) -> None:
    with hub() as server:
        moving = {"main": models / "first", "later": models / "second"}
        server.repositories["checks/moving"] = Repository(moving, fault="moving")
        one, other = run_ranks(another_machine, 2, server.address, models)
    assert one == other
    weights = counted(server, "checks/moving")
    assert {times for (method, path), times in weights.items() if "/blob/" in path and method == "GET"} == {2}


def another_machine(rank: int, ranks: int, address: str, folder: Path) -> str:
    """Rank 1 is on a machine of its own, and the repository changes before it asks."""
    use(address, folder / f"cache {rank}")
    own = replace(Peer.this_process(rank), machine=f"machine {rank}")
    with mock.patch.object(Peer, "this_process", return_value=own):
        source = built("checks/moving").autotp_source
    assert Path(source.files[0]).is_relative_to(folder / f"cache {rank}")
    return Path(source.files[0]).parent.name


def told_of_a_death(rank: int, ranks: int, folder: Path) -> str:
    """Rank 0 fetches until rank 1, which takes it for dead, has said so."""

    def fetch(path_or_repo_id: str, filenames: list[str], **kwargs: Any) -> list[str]:
        assert rank == 0
        dist.barrier()
        while not (folder / "told").exists():
            time.sleep(0.01)
        return [f"/{filenames[0]}"]

    fetch.__module__ = of_transformers.__name__
    use("http://127.0.0.1:1", folder)
    with mock.patch.object(of_transformers, "cached_files", fetch), cached_files_once():
        if rank == 0:
            assert of_transformers.cached_file("checks/dying", "config.json") == "/config.json"
            return ""
        dist.barrier()
        with mock.patch.object(Peer, "is_alive", return_value=False), pytest.raises(PeerError) as caught:
            of_transformers.cached_file("checks/dying", "config.json")
        (folder / "told").touch()
        return str(caught.value)


def test_nobody_waits_for_a_process_that_died(tmp_path: Path) -> None:
    _, told = run_ranks(told_of_a_death, 2, tmp_path)
    assert re.match(r"rank 0 \(process \d+ on .*\) died while fetching config.json of checks/dying", told)
