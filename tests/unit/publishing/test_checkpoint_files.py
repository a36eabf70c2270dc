"""Directories of safetensors are mapped, and what is wrong with them is said."""

from __future__ import annotations

import errno
import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from etha.errors import ConfigError
from etha.publishing.checkpoint_files import CheckpointDirectory, check_dtypes, map_checkpoint
from etha.publishing.checkpoint_index import CheckpointName


def mapped(pointer: int) -> str:
    """The file that this process has mapped at an address; "" if it is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(number, 16) for number in line.split()[0].split("-"))
        if low <= pointer < high:
            return line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) > 5 else ""
    return ""


def test_one_file_is_mapped_and_not_read(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(300, 7), "b": torch.tensor(3, dtype=torch.bfloat16), "none": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors", {"etha.version": "7"})
    found = map_checkpoint(tmp_path)
    assert (found.files, found.version, found.nbytes) == (1, 7, 300 * 7 * 4 + 2)
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found.tensors[name], tensor) and found.tensors[name].dtype == tensor.dtype
    assert mapped(found.tensors["w"].data_ptr()) == str(tmp_path / "model.safetensors")


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors", {"etha.version": '"x"'})
    save_file({"b": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors", {"etha.version": '"y"'})
    save_file({"a": torch.full((2,), 9.0)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {n: f"model-0000{k}-of-00002.safetensors" for k, n in ((1, "a"), (2, "b"))}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = map_checkpoint(tmp_path)
    assert found.files == 2 and found.version is None, "its files belong to different versions"
    assert {name: tensor.tolist() for name, tensor in found.tensors.items()} == {"a": [0, 0], "b": [1, 1]}
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names files that are not there: 'model-00002-of-00002.safetensors'"):
        map_checkpoint(tmp_path)


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not there"):
        map_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file: give a directory"):
        map_checkpoint(tmp_path / "file")


def test_a_directory_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"has no file that ends in .safetensors"):
        map_checkpoint(tmp_path)


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ConfigError, match=r"model.safetensors is no safetensors file that can be read"):
        map_checkpoint(tmp_path)


def test_two_checkpoints_in_one_directory(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"'w' is in a.safetensors and in b.safetensors"):
        map_checkpoint(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="several indexes"):
        map_checkpoint(tmp_path)


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ConfigError, match=r"sub-etha\[safetensors\]"):
        map_checkpoint(tmp_path)


PARTS = [["a"], ["b"], ["c", "d"]]
TENSORS = {name: torch.full((100,), float(value)) for value, name in enumerate("abcd")}


def write(directory: CheckpointDirectory, seq: int, number: int, parts: list[list[str]] = PARTS) -> bool:
    mine = {name: TENSORS[name] for name in parts[number]}
    return directory.write(CheckpointName(seq), parts, number, mine, {"etha.version": str(seq)}, 1600)


def test_a_checkpoint_has_its_name_once_all_files_are_there(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "new" / "run", keep=None)
    directory.prepare()
    assert [write(directory, 3, number) for number in (2, 0)] == [False, False]
    assert directory.newest() == 0 and not (directory.path / "seq-00000003").exists()
    assert write(directory, 3, 1)
    assert directory.newest() == 3
    found = map_checkpoint(directory.path / "latest")
    assert (found.files, found.version) == (3, 3)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in TENSORS.items())


def test_ranks_that_end_at_once_complete_it_once(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=1)
    with ThreadPoolExecutor(3) as pool:
        for seq in range(1, 21):
            assert sum(pool.map(lambda number, seq=seq: write(directory, seq, number), range(3))) == 1
            names = {one.name for one in (tmp_path / f"seq-{seq:08}").iterdir()}
            files = {f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
            assert names == files | {"model.safetensors.index.json"}
    assert {one.name for one in tmp_path.iterdir()} == {"latest", "seq-00000020"}


def test_the_newest_stay_and_what_was_not_finished_goes(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    write(directory, 1, 0)  # another rank could not write its file
    for seq in (2, 3, 10):
        assert write(directory, seq, 0, [["a"]])
    write(directory, 11, 0)  # all ranks died
    left = ["latest", "seq-00000003", "seq-00000010"]
    assert sorted(one.name for one in tmp_path.iterdir()) == [".seq-00000011.3", *left]
    (tmp_path / "notes.txt").touch()
    directory.prepare()
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([*left, "notes.txt"])


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    directory, name = CheckpointDirectory(tmp_path, keep=None), CheckpointName(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            directory.write(name, [["w"]], 0, {"w": torch.zeros(4096)}, {}, 16384)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG and "model.safetensors" in raised.value.filename
    assert directory.newest() == 0
    assert directory.write(name, [["w"]], 0, {"w": torch.zeros(4096)}, {}, 16384)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_are_readable_as_the_directory_is(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        CheckpointDirectory(tmp_path, keep=None).write(CheckpointName(1), [["w"]], 0, {"w": torch.zeros(3)}, {}, 12)
    finally:
        os.umask(before)
    file = tmp_path / "seq-00000001" / "model.safetensors"
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask


def test_dtypes_that_files_cannot_hold_are_named_before_anything_is_received() -> None:
    good = {"a": torch.empty(2, dtype=torch.bfloat16, device="meta"), "b": torch.empty(2, dtype=torch.float8_e4m3fn)}
    check_dtypes(good)
    with pytest.raises(ConfigError, match=r"torch.complex128, the dtype of 'z'"):
        check_dtypes(good | {"z": torch.empty(2, dtype=torch.complex128, device="meta")})
