"""Checkpoints that ask for gigabytes or hold code, facts of the wrong kind, and what is not a regular file."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import socket
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlplace.agents.checkpoint import load_checkpoint
from rlplace.agents.move_ranking import PricedMoves
from rlplace.errors import InputError, RlplaceError
from rlplace.files import check_folder, check_output, read_bytes
from rlplace.runtime.state.untrusted import check_setting, check_storage
from tests.hostile.loaders import TARGETS


@pytest.fixture
def agent(seeds, tmp_path):
    """Returns a copy of a checkpoint without the digest of its weights."""
    return shutil.copytree(seeds / "bare", tmp_path / "agent")


def refused(folder, message):
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(folder)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 400


def test_the_copy_itself_loads(agent):
    assert load_checkpoint(agent).network.settings()["hidden"] == 4


def test_sizes_that_would_take_memory_take_none(agent):
    """Two layers of 4,096 are 68 MB of weights; the file has 4 kB."""
    config = json.loads((agent / "config.json").read_text())
    config["network"] = {"hidden": 4096, "second": 4096}
    (agent / "config.json").write_text(json.dumps(config))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(agent, "the config asks for|is missing")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # kB


class Evil:
    """An object that runs code when it is unpickled."""

    def __reduce__(self):
        return (open, ("ran", "w"))


def pickles(tmp_path):
    plain, torch_file, zipped = pickle.dumps(Evil()), tmp_path / "t.pt", tmp_path / "z.npz"
    torch.save({"x": torch.ones(2)}, torch_file)
    with zipfile.ZipFile(zipped, "w") as archive:
        for name in ("features", "change"):
            array = np.array([Evil()], dtype=object)
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=True)
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    return [plain, torch_file.read_bytes(), zipped.read_bytes(), struct.pack("<Q", len(header)) + header]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("name", ["policy.safetensors", "config.json"])
def test_pickles_and_other_files_in_place_of_these(agent, tmp_path, monkeypatch, number, name):
    monkeypatch.chdir(tmp_path)
    (agent / name).write_bytes(pickles(tmp_path)[number])
    refused(agent, "not a safetensors file|not a UTF-8|not valid JSON")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("number", range(4))
def test_labels_that_are_pickles(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(pickles(tmp_path)[number])
    with pytest.raises(InputError, match="not a file of labels") as caught:
        PricedMoves.load(tmp_path / "x.safetensors")
    assert str(caught.value).isprintable() and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("saved", "present"),
    [(None, (0.9, 0.999)), (None, 0.001), ([0.9], (0.9, 0.999)), ("x", 0.1), (1, True), (None, "mean"), ([1], None)],
)
def test_settings_of_another_kind_are_refused(saved, present):
    with pytest.raises(InputError, match="the setting"):
        check_setting(saved, present, "the setting")


@pytest.mark.parametrize(
    ("saved", "present"), [([0.9, 0.99], (0.9, 0.999)), (None, True), (False, True), (True, None), (None, None), (2, 0.1)]
)
def test_settings_of_the_same_kind_are_taken(saved, present):
    check_setting(saved, present, "the setting")


@pytest.mark.parametrize("name", [{}, [], None, 5, "../x", "a/b", ""])
def test_an_index_that_names_no_file_beside_it_is_refused(name, tmp_path):
    with pytest.raises(InputError, match=r"outside of the checkpoint|is missing"):
        check_storage({"tensor": SimpleNamespace(relative_path=name)}, tmp_path)


FILES = {name: target.files[0] for name, target in TARGETS.items() if not name.endswith("text") and name != "networkx"}


def make(kind: str, path: Path) -> None:
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "circle":
        path.symlink_to(path.name)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "circle", "nothing"])
@pytest.mark.parametrize("name", FILES)
def test_loaders_take_regular_files_alone(name, kind, scratch, no_hang):
    path = scratch / FILES[name]
    before = path.read_bytes()
    make(kind, path)
    # An output may be new, and a run may have no state to go on from: what leads nowhere is nothing there.
    nothing_there = kind in ("nothing", "circle") and name in ("comparison", "comparison lines", "resume state")
    try:
        if nothing_there:
            TARGETS[name].use(path, scratch)
            return
        with pytest.raises(RlplaceError) as caught:
            TARGETS[name].use(path, scratch)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 600
    finally:
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(before)


def test_a_socket(tmp_path, no_hang):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(InputError, match=r"cannot be read|is a socket"):
            read_bytes(tmp_path / "s")


def test_what_tells_no_size_is_read_up_to_the_limit():
    assert b"Name:" in read_bytes("/proc/self/status")
    with pytest.raises(InputError, match="more than 10 bytes, which is the limit"):
        read_bytes("/proc/self/status", 10)


def test_outputs_are_regular_files(tmp_path, no_hang):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    for path in (tmp_path / "new", tmp_path / "file", tmp_path / "link"):
        check_output(path)
    for path, message in (
        (tmp_path, "Is a directory"),
        (tmp_path / "pipe", "a pipe, not a regular file"),
        ("/dev/null", "a device, not a regular file"),
        (tmp_path / "file" / "x", "cannot be written"),
        (tmp_path / "none" / "x", "there is no folder"),
        (tmp_path / ("n" * 300), "too long"),
        ("a\0b", "cannot be written"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            check_output(path)
        assert str(caught.value).isprintable()


def test_folders_to_write(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "new", tmp_path / "new" / "deeper"):
        check_folder(path)
    assert sorted(os.listdir(tmp_path)) == ["file"]
    for path in (tmp_path / "file", tmp_path / "file" / "x", "a\0b", tmp_path / ("n" * 300)):
        with pytest.raises(InputError, match="cannot be written"):
            check_folder(path)
