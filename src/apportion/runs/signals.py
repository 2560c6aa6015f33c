"""Stop long compiled work on Ctrl-C and SIGTERM, since compiled code does not handle signals."""

import contextvars
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.2


@contextmanager
def listening(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM in the block; only in the main thread."""
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stoppable(work: Callable[[], T], saved: str = "there was nothing to save") -> T:
    """Return `work()`; a signal ends the process at once with exit code 2.

    For work that saves nothing, such as a backtest. It runs in a thread while the main thread waits for
    signals. Compiled code cannot be interrupted, so the process exits without waiting for it and prints
    the message `saved`.

    Examples
    --------
    >>> stoppable(lambda: 2 + 3)
    5
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            raised.append(error)

    def leave(number: int, frame: Any) -> None:
        # Ignore a second signal.
        signal.signal(number, signal.SIG_IGN)
        print(f"apportion: stopped at once; {saved}", file=sys.stderr, flush=True)
        # An ordinary exit would wait for the compiled work.
        os._exit(2)

    # Copy the context, so that settings of JAX and of warnings apply in the thread.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    with listening(leave):
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
    if raised:
        raise raised[0]
    return found[0]


def tested_after_training(work: Callable[[], T]) -> T:
    """`stoppable` for tests of a policy whose training is saved."""
    return stoppable(work, "the training is saved, and `apportion resume` tests the policy again")
