"""Checkpoints of an agent that ask for gigabytes or hold code; what else is refused is tested beside the agent."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import struct
import zipfile

import numpy as np
import pytest
import torch

from rlplace.agents.checkpoint import load_checkpoint
from rlplace.agents.labels import Labels
from rlplace.errors import InputError


@pytest.fixture
def agent(seeds, tmp_path):
    """A copy of a checkpoint without the digest of its weights."""
    return shutil.copytree(seeds / "bare", tmp_path / "agent")


def refused(folder, message):
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(folder)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 400


def test_the_copy_itself_loads(agent):
    assert load_checkpoint(agent).network.config.hidden == 4


def test_sizes_that_would_take_gigabytes_take_none(agent):
    """64 rounds of 4,096 channels are 17 GB of weights; the file has 4 kB."""
    config = json.loads((agent / "config.json").read_text())
    config["network"] = {"hidden": 4096, "second": 4096, "layers": 64}
    (agent / "config.json").write_text(json.dumps(config))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(agent, "the config asks for|is missing")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


class Evil:
    """What runs code when it is unpickled."""

    def __reduce__(self):
        return (open, ("ran", "w"))


def pickles(tmp_path):
    plain, torch_file, zipped = pickle.dumps(Evil()), tmp_path / "t.pt", tmp_path / "z.npz"
    torch.save({"x": torch.ones(2)}, torch_file)
    with zipfile.ZipFile(zipped, "w") as archive:
        for name in ("features", "change", "group", "nodes", "edges", "edge_values"):
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
    (tmp_path / "x.npz").write_bytes(pickles(tmp_path)[number])
    with pytest.raises(InputError, match=r"not a file of labels|is not an array of float16") as caught:
        Labels.load(tmp_path / "x.npz")
    assert str(caught.value).isprintable() and not (tmp_path / "ran").exists()


def test_labels_that_unpack_to_more_than_they_are(tmp_path):
    """A header that asks for a terabyte, and zeros that shrink to nothing."""
    path = tmp_path / "x.npz"
    header = (
        b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f2', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(127) + b"\n"
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("features.npy", header)
    with pytest.raises(InputError, match="does not hold what its shape says"):
        Labels.load(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("features.npy", bytes((1 << 28) + 1))
    assert path.stat().st_size < 1 << 21
    with pytest.raises(InputError, match="the limit is 268435456"):
        Labels.load(path)
