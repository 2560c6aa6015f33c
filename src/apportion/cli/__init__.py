"""The command line: find the command, run it and exit with a code.

Exit code 0 is success; 2 is an error that the user can fix, with one sentence on standard error; 1 is a
bug. With `--json`, standard output is one JSON object. JAX starts only if a command needs it.
"""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from apportion.errors import InputError

COMMANDS = {
    "demo": "show the method on embedded data, on one page, in minutes on 2 cores",
    "train": "train a policy and save it in a folder",
    "resume": "continue a run exactly where it stopped",
    "backtest": "test a trained policy on past data, with baselines",
    "certify": "test whether a policy is better than a baseline: certified, not yet, or harmful",
    "allocate": "compute the allocation of the next period",
    "serve": "run a live controller: HTTP, a page, and the protocols of the domain",
    "study": "reproduce a figure or claim of the paper, with a verdict",
    "report": "write one HTML page of a run or a study",
    "check": "show versions, devices and extras; validate data files",
}
"""Purpose of each command."""

_HELP = """usage: apportion COMMAND [OPTIONS]

Learn to allocate a resource over time: one policy for every subset of a universe of entities.

commands:
{commands}

examples:
  apportion demo
  apportion train --help                    list the domains
  apportion train NAME --out runs/first
  apportion backtest runs/first --json
  apportion certify runs/first --against NAME
  apportion allocate runs/first --json
  apportion study fig1 --out studies/fig1

All options of a command: apportion COMMAND --help
"""

_WAY_OUT = (
    "free some space or choose a writable folder; what was saved before is intact, and "
    "`apportion resume` continues a run"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    warnings.showwarning = _show_warning
    if threading.current_thread() is threading.main_thread():
        # Treat SIGTERM as Ctrl-C, so that the state of the run is reported.
        signal.signal(signal.SIGTERM, _end)
    try:
        with _only_results_on_stdout() as out:
            _run(list(sys.argv[1:] if arguments is None else arguments), out)
        code = 0
    except InputError as error:
        print(f"apportion: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("apportion: stopped at once, nothing more was saved", file=sys.stderr, flush=True)
        if arguments is None:
            # Compiled work may still run in a thread, and would crash during an ordinary exit.
            os._exit(2)
        code = 2
    except BrokenPipeError:
        # The reader, such as `| head`, has closed standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 2
    except Exception as error:
        # Such as full disks, long names, circular links, and limits on file sizes.
        if isinstance(error, OSError) and error.errno is not None:
            place = f"{error.filename}: " if error.filename else ""
            print(f"apportion: {place}{error.strerror}; {_WAY_OUT}", file=sys.stderr)
            code = 2
        else:
            import traceback

            traceback.print_exception(error)
            print("apportion: this is a bug in apportion, please report it", file=sys.stderr)
            code = 1
    sys.exit(code)


def _end(number: int, frame: Any) -> None:
    """Raise `KeyboardInterrupt` once; `timeout` can send the signal twice."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(argv: list[str], out: TextIO) -> None:
    """Run one command and write its result, or the help, to `out`."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        # Without the parser, which is slow to import.
        lines = [f"  {name:12} {purpose}" for name, purpose in COMMANDS.items()]
        out.write(_HELP.format(commands="\n".join(lines)))
        return
    if argv[0] == "--version":
        import apportion

        out.write(f"apportion {apportion.__version__}\n")
        return
    if argv[0] not in COMMANDS:
        from apportion.runs.settings import suggest

        near = suggest(argv[0], COMMANDS) or "; see apportion --help"
        raise InputError(f"there is no command {argv[0]!r}; choose {', '.join(COMMANDS)}{near}")

    from apportion.cli.parser import run_command

    result = run_command(argv[0], argv[1:], out)
    if result is None:
        return
    if not isinstance(result, str):
        from apportion.runs.files import to_json

        result = to_json(result)
    out.write(result if result.endswith("\n") else f"{result}\n")


@contextmanager
def _only_results_on_stdout() -> Iterator[TextIO]:
    """Yield a stream for results, and redirect all other standard output to standard error.

    The file descriptor is redirected, which includes libraries and child processes.
    """
    if sys.stderr is None:
        # Standard error is closed: discard messages, and prevent other files from taking its number.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if sys.stdout is None:
        raise InputError(
            "standard output is closed; leave it open, or redirect it to a file or /dev/null"
        )
    sys.stdout.flush()
    results = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(results), "w", encoding="utf-8") as out:
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(results, 1)
        os.close(results)


def _show_warning(message: Any, category: Any, *_: Any) -> None:
    print(f"apportion: warning: {message}", file=sys.stderr)
