"""What is not a regular file: folders, pipes, devices, links in circles, names that cannot be."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from benchmarks.hostile.targets import TARGETS
from rlplace.errors import InputError, RlplaceError
from rlplace.files import check_folder, check_output, read_bytes

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
