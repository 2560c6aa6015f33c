"""The command line: finds the command, runs it, and turns what happens into an exit code.

0 is done; 2 is for what the user can fix, with one sentence on standard error; 1 is a bug. With
`--json` standard output carries one JSON object and nothing else. JAX starts only where it is needed.
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
    "demo": "the method on embedded data, one page, minutes on 2 cores",
    "train": "train a policy, and keep it in a folder",
    "resume": "continue a run exactly where it stopped",
    "backtest": "a trained policy on past data, with baselines",
    "certify": "may a policy be switched on? certified, not yet, or harmful",
    "allocate": "the next period's allocation",
    "serve": "a live controller: HTTP, a page, and what the domain speaks",
    "study": "a figure or claim of the paper, with its verdict",
    "report": "one HTML page of a run or a study",
    "check": "versions, devices, extras; what is wrong with a data file",
}
"""Each command and its purpose."""

_HELP = """usage: apportion COMMAND [OPTIONS]

Learn to share out a resource over time: one policy for every subset of a universe of entities.

commands:
{commands}

examples:
  apportion demo
  apportion train --help                    what can be trained
  apportion train NAME --out runs/first
  apportion backtest runs/first --json
  apportion certify runs/first --against NAME
  apportion allocate runs/first --json
  apportion study fig1 --out studies/fig1

All options of a command: apportion COMMAND --help
"""

_WAY_OUT = (
    "make room or choose a place that can be written to; what was saved before is whole, and a run "
    "goes on with `apportion resume`"
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
            # Compiled work may still run, and would crash in a process that is being taken apart.
            os._exit(2)
        code = 2
    except BrokenPipeError:
        # The reader of standard output has closed it, as `| head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 2
    except Exception as error:
        # Disks that are full, names that are too long, links in a circle, limits on the size of files.
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
    """As Ctrl-C, once: `timeout` sends a signal again while the first is answered."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(argv: list[str], out: TextIO) -> None:
    """Run one command; what it returns, or the help that was asked for, is written to `out`."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        # Without the parser, which takes longer to start than this takes to read.
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
    """Hand out a stream for results; whatever else writes to standard output goes to the logs.

    The switch is made on the file descriptor, so that it holds for libraries and child processes.
    """
    if sys.stderr is None:
        # Closed: what is said goes nowhere, and no other file takes its number.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if sys.stdout is None:
        raise InputError(
            "standard output is closed; leave it open, or send it to a file or /dev/null"
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
