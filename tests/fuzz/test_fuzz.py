"""Every reader of files returns or refuses in one sentence; run.py tries far more files."""

import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from readers import READERS, SLOW, changed, read_quietly, write

from apportion.errors import InputError


@pytest.mark.parametrize("name", READERS)
def test_sound_files_are_read(name, tmp_path):
    read_quietly(READERS[name], write(READERS[name].files(), tmp_path))


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.share > SLOW])
@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_a_damaged_file_is_read_or_refused(name, rng):
    files = changed(READERS[name], rng)
    with tempfile.TemporaryDirectory() as folder:
        write(files, Path(folder))
        with contextlib.suppress(InputError):
            read_quietly(READERS[name], Path(folder))
