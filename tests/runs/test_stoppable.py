"""Compiled work is stopped by a signal at once, and otherwise is as if called directly."""

import os
import signal
import subprocess
import sys
import time
import warnings

import pytest

from apportion.runs.runner import stoppable

# One compiled loop of hours.
ENDLESS = """
import jax, jax.numpy as jnp
from apportion.runs.runner import stoppable

def endless():
    print("begun", flush=True)
    matrix = jnp.eye(300)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 10**7, lambda i, x: x @ matrix, x))
    return loop(matrix).block_until_ready()

stoppable(endless)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_compiled_work_at_once(number):
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n"
    # Well into the loop, which takes hours.
    time.sleep(3)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert errors.endswith("apportion: stopped at once; nothing was to be saved\n")


def test_what_work_returns_raises_and_warns_comes_through():
    before = signal.getsignal(signal.SIGINT)
    assert stoppable(lambda: "done") == "done"
    with pytest.raises(ZeroDivisionError):
        stoppable(lambda: 1 / 0)
    with pytest.warns(UserWarning, match="careful"):
        stoppable(lambda: warnings.warn("careful", stacklevel=1))
    assert signal.getsignal(signal.SIGINT) is before
