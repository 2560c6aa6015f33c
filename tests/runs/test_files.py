"""Writes are atomic, a folder has one writer, and damage is detected."""

import errno
import hashlib
import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from apportion.errors import InputError
from apportion.runs.files import (
    SUMS,
    _unpack,
    checksummed,
    only_writer,
    pack,
    read_arrays,
    read_bytes,
    read_json,
    require_free,
    require_writable,
    write_arrays,
    write_checked,
    write_json,
)

ARRAYS = {
    "parameters/of_held": np.array(0.5, np.float32),
    "memory/periods": np.arange(6, dtype=np.int32).reshape(2, 3).T,
    "mask": np.array([True, False]),
    "key": np.array([7, 2**32 - 1], np.uint32),
    "none": np.zeros((0, 3), np.float32),
}
RAW = pack(ARRAYS, {"step": 3})


def flips(raw, every=1):
    """The bytes with one bit of each byte flipped in turn."""
    for place in range(0, len(raw), every):
        yield raw[:place] + bytes([raw[place] ^ 1 << place % 7]) + raw[place + 1 :]


def test_what_is_packed_comes_back_with_its_types_and_shapes():
    arrays, about = _unpack(RAW, "x")
    assert about == {"step": 3}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        np.testing.assert_array_equal(arrays[name], array)
    # The same content gives the same bytes.
    assert pack(dict(reversed(ARRAYS.items())), about) == RAW


def test_checksums_are_those_of_sha256sum_and_of_files_that_are_there(tmp_path):
    for name in ("checkpoints/1", "checkpoints/2"):
        write_checked(tmp_path, name, name.encode())
    # A process killed in an append leaves half a line; a file removed and made again has two.
    with open(tmp_path / SUMS, "ab") as file:
        file.write(b"abc")
    (tmp_path / "checkpoints/1").unlink()
    write_checked(tmp_path, "checkpoints/2", b"other")
    assert read_bytes(tmp_path / "checkpoints/2") == b"other"
    with checksummed(tmp_path, "a.json", "not-there.csv"):
        write_json(tmp_path / "a.json", {})
    lines = (tmp_path / SUMS).read_text().splitlines()
    sound = [
        f"{hashlib.sha256(c).hexdigest()}  {n}"
        for n, c in (("a.json", b"{}\n"), ("checkpoints/2", b"other"))
    ]
    assert [line for line in lines if line != "abc"] == sound


def test_any_byte_flipped_of_a_file_or_of_its_checksum_is_detected_or_changes_nothing(tmp_path):
    content, sums = tmp_path / "results.json", tmp_path / SUMS
    with checksummed(tmp_path, "results.json"):
        write_json(content, {"served": 0.5})
    for file in (content, sums):
        raw, refused = file.read_bytes(), 0
        for broken in flips(raw):
            file.write_bytes(broken)
            try:
                assert read_json(content) == {"served": 0.5}
            except InputError as error:
                assert str(error).startswith(f"{content}: the checksum")  # noqa: PT017
                refused += 1
        file.write_bytes(raw)
        assert refused == len(raw) if file == content else refused >= 64


def test_a_process_that_dies_while_writing_leaves_no_checksum_of_other_content(tmp_path):
    for content in (1, 2):
        with checksummed(tmp_path, "a.json"):
            write_json(tmp_path / "a.json", content)

    def die():
        with checksummed(tmp_path, "a.json"):
            write_json(tmp_path / "a.json", 3)
            raise OSError("power cut")

    with pytest.raises(OSError, match="power cut"):
        die()
    assert read_json(tmp_path / "a.json") == 3


def test_a_crash_during_a_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    write_arrays(path, ARRAYS, {"step": 1})

    def crash(*_):
        raise OSError("power cut")

    for fault in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, fault, crash)
            with pytest.raises(OSError, match="power cut"):
                write_arrays(path, {}, {"step": 2})
    assert read_arrays(path)[1] == {"step": 1}
    assert {file.name for file in tmp_path.iterdir()} == {"state.safetensors", SUMS}


HOLD = """
import sys
from pathlib import Path
from apportion.runs.files import only_writer
with only_writer(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.readline()
"""


def _write_in(folder):
    with only_writer(folder):
        pass


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match="another process is writing in it"):
            _write_in(tmp_path)
        process.kill()
        process.wait()
        _write_in(tmp_path)


def test_what_a_killed_save_left_is_removed_by_the_next_and_nothing_else(tmp_path):
    (tmp_path / "cells").mkdir()
    names = (
        ".a.json.12.part",
        f".{SUMS}.3.part",
        ".b.json.34.part",
        "cells/.c.parquet.5.part",
        ".mine.part",
    )
    for name in names:
        (tmp_path / name).touch()

    def there():
        return [name for name in names if (tmp_path / name).exists()]

    # Another process may be saving the others.
    with checksummed(tmp_path, "a.json"):
        assert there() == list(names[2:])
    # The only writer of the folder.
    _write_in(tmp_path)
    assert there() == [".mine.part"]


def test_folders_that_cannot_be_written_are_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / ".gitkeep").touch()
    # An empty folder with hidden files is room enough.
    require_free(tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file; choose a folder that can be created"):
        require_writable(tmp_path / "file" / "deep" / "run")

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(InputError, match="is not writable"):
        require_free(tmp_path / "run")
