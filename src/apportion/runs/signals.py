"""Long compiled work that Ctrl-C and SIGTERM can stop: compiled code listens to no signal itself."""

import contextvars
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_LOOK_EVERY = 0.2


@contextmanager
def listening(handle: Callable[[int, Any], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM are handled so, until the block's end; the main thread alone can."""
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stoppable(work: Callable[[], T], saved: str = "nothing was to be saved") -> T:
    """What `work` returns; at a signal the process ends at once, with exit code 2.

    For work that saves nothing, such as a backtest: it runs in a thread of its own while this one
    listens. What is compiled cannot be called back, so the process goes without waiting for it, and
    says what is `saved`.

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
        # A signal that is sent again is not answered again.
        signal.signal(number, signal.SIG_IGN)
        print(f"apportion: stopped at once; {saved}", file=sys.stderr, flush=True)
        # Leaving in the ordinary way would wait for the compiled work.
        os._exit(2)

    # The same context: settings of JAX and of warnings hold in the thread too.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    with listening(leave):
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_EVERY)
    if raised:
        raise raised[0]
    return found[0]


def tested_after_training(work: Callable[[], T]) -> T:
    """What `work` returns: tests of a policy whose training is saved, which a signal stops at once."""
    return stoppable(work, "the training is saved, and `apportion resume` tests the policy again")
