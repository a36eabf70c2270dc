"""Which files of a checkpoint hold which tensors."""

from __future__ import annotations

import json

import pytest

from etha.errors import ConfigError
from etha.publishing.checkpoint_index import (
    CheckpointName,
    file_name,
    place_tensors,
    read_index,
    read_version,
    share_out,
    write_index,
)


def test_an_index_is_read_as_it_was_written() -> None:
    files = {"b": "model-00002-of-00002.safetensors", "a": "model-00001-of-00002.safetensors"}
    text = write_index(files, 12, {"etha.seq": "3"})
    assert read_index("it", text) == files
    assert json.loads(text)["metadata"] == {"total_size": 12, "etha.seq": "3"}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{", "is not JSON"),
        ("[]", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "of its own directory"),
        ('{"weight_map": {"a": "b.bin"}}', "of its own directory"),
    ],
)
def test_what_is_no_index_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"the index.*{wrong}"):
        read_index("the index", text)


def test_tensors_are_found_in_any_number_of_files() -> None:
    assert place_tensors("d", {"y": ["a"], "x": ["c", "b"]}, None) == {"a": "y", "b": "x", "c": "x"}


def test_an_index_decides_which_file_a_tensor_is_read_from() -> None:
    held = {"x": ["a", "b"], "y": ["a"]}
    assert place_tensors("d", held, {"a": "y", "b": "x"}) == {"a": "y", "b": "x"}


def test_a_tensor_that_is_there_twice_is_refused_with_both_files() -> None:
    with pytest.raises(ConfigError, match="'a' is in x and in y"):
        place_tensors("d", {"x": ["a"], "y": ["a"]}, None)


def test_tensors_that_only_the_index_knows_are_named() -> None:
    with pytest.raises(ConfigError, match="names 2 tensors that their files do not have: 'b', 'c'"):
        place_tensors("d", {"x": ["a"]}, {"a": "x", "c": "x", "b": "x"})


def test_a_directory_without_any_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="hold no tensor"):
        place_tensors("d", {"x": []}, None)


@pytest.mark.parametrize(
    ("text", "version"), [("7", 7), ('"step-7"', "step-7"), ("null", None), ("", None), ("[1]", None), ("true", None)]
)
def test_a_label_in_the_metadata(text: str, version: int | str | None) -> None:
    assert read_version(text) == version


def test_files_are_named_as_hugging_face_names_them() -> None:
    assert file_name(0, 1) == "model.safetensors"
    assert [file_name(n, 2) for n in range(2)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_the_largest_tensors_are_shared_out_first() -> None:
    sizes = {"a": 5, "b": 4, "c": 3, "d": 3, "e": 0}
    parts = share_out(sizes, 2)
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    assert max(sum(sizes[name] for name in part) for part in parts) == 8
    assert share_out(dict(reversed(sizes.items())), 2) == parts, "every rank computes the same"
    assert share_out({"a": 1}, 3) == [["a"], [], []]


def test_names_of_directories() -> None:
    assert str(CheckpointName(12)) == "seq-00000012" and str(CheckpointName(10**9)) == "seq-1000000000"
    assert [CheckpointName.parse(str(CheckpointName(seq))) for seq in (0, 12, 10**9)] == [
        CheckpointName(0),
        CheckpointName(12),
        CheckpointName(10**9),
    ]
    for other in ("seq-12", ".seq-00000012", "seq-0000001x", "latest", "seq-", "seq-\u0661" * 8):
        assert CheckpointName.parse(other) is None
    assert CheckpointName(9) < CheckpointName(10**9)
