"""Checkpoints in object stores: in memory, and on a real S3 server of this machine."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from ckptkit import assert_same_run, killed, run

from forge_ckpt import open_checkpoint
from forge_ckpt.errors import CheckpointError
from forge_ckpt.objects import ObjectStore
from forge_ckpt.stored import StoredCheckpoint

# of the S3 clients, not of ours
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture
def memory() -> Iterator[str]:
    fs = fsspec.filesystem("memory")
    yield "memory://bucket/runs"
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server on loopback, with a bucket."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    before = dict(os.environ)
    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1")
    os.environ.update(AWS_ENDPOINT_URL=f"http://{host}:{port}", NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    fs.mkdir("bucket")
    yield "s3://bucket/runs"
    running.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(params=["memory", "server"])
def address(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return f"{url}/{request.node.originalname}"


CONSTANT = {"scheduler": {"name": "constant"}}


def test_killed_and_resumed(address: str, tmp_path: Path) -> None:
    table = {"url": address, "keep_last": 2, "mode": "async"}
    straight = run(tmp_path / "s", steps=6, **CONSTANT)
    killed(tmp_path / "k", 4, checkpoint=table, **CONSTANT)
    store = ObjectStore(f"{address}/a")
    assert store.names() == ["step_00000002", "step_00000003"]
    assert store.latest() == "step_00000003"
    resumed = run(tmp_path / "k", steps=6, checkpoint=table, **CONSTANT)
    assert resumed.losses == straight.losses[3:]
    assert_same_run(straight, resumed)
    assert store.names() == ["step_00000005", "step_00000006"]
    saved = open_checkpoint(f"{address}/a/step_00000006")
    assert saved.verify() == []
    assert torch.equal(saved.tensor("model/embed.weight"), straight.weights["embed.weight"])
    assert not (tmp_path / "k/a/checkpoints").exists()


def test_what_has_no_manifest_is_no_checkpoint(address: str, tmp_path: Path) -> None:
    """The upload of step 4 was cut before its manifest: it is cleared away, and 3 is used."""
    table = {"url": address}
    run(tmp_path, steps=4, checkpoint=table, **CONSTANT)
    store = ObjectStore(f"{address}/a")
    store.fs.rm_file(f"{store.root}/step_00000004/manifest.json")
    assert open_checkpoint(f"{address}/a").manifest.step == 3
    assert len(run(tmp_path, steps=4, checkpoint=table, **CONSTANT).losses) == 1
    assert store.size("step_00000004", "manifest.json") is not None


def test_damage_is_noticed(address: str, tmp_path: Path) -> None:
    table = {"url": address}
    run(tmp_path, steps=3, checkpoint=table, **CONSTANT)
    store = ObjectStore(f"{address}/a")
    path = f"{store.root}/step_00000003/weights_00000.safetensors"
    data = bytearray(store.fs.cat_file(path))
    data[-5] ^= 1
    store.fs.pipe_file(path, bytes(data))
    assert len(run(tmp_path, steps=4, checkpoint=table, **CONSTANT).losses) == 2


def test_the_root_of_a_store_and_a_kind_that_nobody_knows(memory: str, tmp_path: Path) -> None:
    run(tmp_path, steps=1, checkpoint={"url": "memory://"}, **CONSTANT)
    assert ObjectStore("memory://a").names() == ["step_00000001"]
    with pytest.raises(CheckpointError, match="foo://x cannot be used: Protocol not known: foo") as caught:
        ObjectStore("foo://x")
    assert caught.value.exit_status == 2


def test_a_failed_upload(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ObjectStore._write

    def write(self: Any, path: str, parts: Any) -> Any:
        if "step_00000003/optimizer" in path:
            raise ConnectionResetError("connection reset by peer")
        return real(self, path, parts)

    monkeypatch.setattr(ObjectStore, "_write", write)
    with pytest.raises(CheckpointError, match="connection reset by peer"):
        run(tmp_path, steps=4, checkpoint={"url": memory}, **CONSTANT)
    store = ObjectStore(f"{memory}/a")
    assert store.names() == ["step_00000001", "step_00000002"]
    assert store.latest() == "step_00000002"


def test_bytes_that_are_only_looked_at_are_let_go_of(memory: str, tmp_path: Path) -> None:
    """A checkpoint may be larger than memory."""
    run(tmp_path, steps=1, checkpoint={"url": memory})
    read: list[weakref.ref[Any]] = []

    class Noted(ObjectStore):
        def buffer(self, name: str, path: str) -> memoryview:
            content = np.frombuffer(self.read(name, path), dtype=np.uint8).copy()
            read.append(weakref.ref(content))
            return content.data

    saved = StoredCheckpoint(Noted(f"{memory}/a"), "step_00000001")
    assert saved.verify(keep=False) == []
    assert len(read) == len(saved.manifest.files)
    assert all(content() is None for content in read)
    assert saved.verify() == []
    assert any(content() is not None for content in read), "kept for a load that follows"


def test_ranks_replace_a_checkpoint_together(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the old manifest away; one is faster."""
    store = ObjectStore(f"{memory}/a")
    store.commit(3, "token", b"{}")
    real = ObjectStore.size

    def size(self: Any, name: str, path: str) -> int | None:
        found = real(self, name, path)
        self.fs.rm_file(self._path(name, path))
        return found

    monkeypatch.setattr(ObjectStore, "size", size)
    assert store.begin(3, "token") == "step_00000003"


def test_another_folder(tmp_path: Path) -> None:
    run(tmp_path, steps=2, checkpoint={"url": str(tmp_path / "elsewhere")})
    assert open_checkpoint(tmp_path / "elsewhere/a").manifest.step == 2


def test_an_address_of_nothing(memory: str, tmp_path: Path) -> None:
    for place in (f"{memory}/none", f"{memory}/none/step_00000004"):
        with pytest.raises(CheckpointError, match=r"there (is|are) no checkpoint"):
            run(tmp_path, steps=2, checkpoint={"resume": place})
    with pytest.raises(CheckpointError, match="nosuch"):
        run(tmp_path, steps=2, checkpoint={"resume": "nosuch://bucket/a"})
