"""Checkpoints of an agent that are not what they say: each is refused with one line that says what is wrong."""

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
from safetensors.torch import load, save_file

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


def configured(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_copy_itself_loads(agent):
    assert load_checkpoint(agent).network.config.hidden == 4


def test_sizes_that_would_take_gigabytes_take_none(agent):
    """64 rounds of 4,096 channels are 17 GB of weights; the file has 4 kB."""
    configured(agent, network={"hidden": 4096, "second": 4096, "layers": 64})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(agent, "the config asks for|is missing")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": {"hidden": 1 << 40, "second": 4, "layers": 1}}, r"outside 1\.\.4096"),
        ({"network": {"hidden": 4, "second": 4, "layers": 1, "depth": 9}}, "unknown key 'depth'"),
        ({"network": {"hidden": 5, "second": 4, "layers": 1}}, "the config asks for"),
        ({"network": {"hidden": 4, "second": 4, "layers": 2}}, "is missing"),
        ({"network": None}, "expected an object"),
        ({"features": ["a"]}, "other features"),
        ({"features": {"a": 1}}, "other features"),
        ({"environment": "rlplace/Placement-v0"}, "other features"),
        ({"environment": 5}, "is not one of this version"),
        ({"training": []}, "training must be an object"),
        ({"weights": "0" * 64}, "not the weights that config.json was written with"),
        ({"weights": None}, "not the weights that config.json was written with"),
        ({"optimiser": 1}, "unknown key 'optimiser'"),
        ({"version": 3}, "upgrade rlplace"),
        ({"version": 1}, "is missing|other features|unknown key|written as"),
    ],
)
def test_configs_that_lie(agent, changes, message):
    if changes == {"version": 1}:
        changes = {"version": 1, "features": ["of old"]}
    configured(agent, **changes)
    refused(agent, message)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers(agent, value):
    weights = load((agent / "policy.safetensors").read_bytes())
    weights["second.bias"][1] = value
    save_file(weights, agent / "policy.safetensors")
    refused(agent, "'second.bias' holds values that are not finite")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_weights_of_another_type(agent, dtype):
    weights = load((agent / "policy.safetensors").read_bytes())
    save_file(weights | {"second.bias": weights["second.bias"].to(dtype)}, agent / "policy.safetensors")
    refused(agent, f"is of {dtype}, not of torch.float32")


def test_weights_of_another_shape(agent):
    weights = load((agent / "policy.safetensors").read_bytes())
    save_file(weights | {"second.bias": torch.zeros(5)}, agent / "policy.safetensors")
    refused(agent, r"has shape \(5,\), the config asks for \(4,\)")


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


@pytest.mark.parametrize("name", ["policy.safetensors", "config.json", "card.md"])
def test_a_part_that_is_missing(agent, name):
    (agent / name).unlink()
    refused(agent, name)


def test_weights_of_another_training_with_this_config(seeds, tmp_path):
    """The digest in the config belongs to the weights that were saved with it."""
    folder = shutil.copytree(seeds / "agent", tmp_path / "agent")
    weights = load((folder / "policy.safetensors").read_bytes())
    save_file({name: value + 1 for name, value in weights.items()}, folder / "policy.safetensors")
    refused(folder, "save or copy the checkpoint again")
