"""The command line: finds the command, runs it, and turns what happens into an exit code.

0 is done; 2 is for what the user can mend, with one sentence on standard error; 1 is a bug. With
`--json` standard output carries one JSON object and nothing else. JAX starts only where it is needed.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from apportion.cli.asked import HelpAsked
from apportion.errors import InputError
from apportion.runs.settings_file import suggest

_COMMANDS = {
    "demo": ("apportion.cli.demo", "the main job on embedded data, minutes on 2 cores"),
    "train": ("apportion.cli.train", "train a policy: portfolio, federated or budget"),
    "resume": ("apportion.cli.train", "continue a run exactly where it stopped"),
    "backtest": ("apportion.cli.portfolio", "a trained policy on prices, with baselines"),
    "allocate": ("apportion.cli.portfolio", "the next period's allocation"),
    "study": ("apportion.cli.study", "a figure or claim of the paper, with its verdict"),
    "report": ("apportion.cli.study", "one HTML page of a run or a study"),
    "check": ("apportion.cli.check", "versions, devices, extras; what is wrong with a data file"),
}

_HELP = """usage: apportion COMMAND [OPTIONS]

Learn to share out a resource over time: one policy for every subset of a universe of entities.

commands:
{commands}

examples:
  apportion demo
  apportion train portfolio --prices prices.csv --out runs/first
  apportion backtest runs/first --prices prices.csv --start 2019-01-01 --json
  apportion allocate runs/first --prices prices.csv --json
  apportion study fig1 --out studies/fig1

Each command explains itself: apportion COMMAND --help
"""


def help_text() -> str:
    """What `apportion --help` prints."""
    lines = [f"  {name:10} {words}" for name, (_, words) in _COMMANDS.items()]
    return _HELP.format(commands="\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = _show_warning
    try:
        with _only_results_on_stdout() as say:
            code = _dispatch(argv, say)
    except InputError as error:
        print(f"apportion: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("apportion: stopped at once, nothing more was saved", file=sys.stderr)
        code = 2
    except BrokenPipeError:
        # The reader of our output has gone, as `| head` does; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 2
    except Exception:
        import traceback

        traceback.print_exc()
        print("apportion: this is a bug in apportion, please report it", file=sys.stderr)
        code = 1
    sys.exit(code)


def _dispatch(argv: list[str], say: Callable[[str], None]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        say(help_text())
        return 0
    if argv[0] == "--version":
        from apportion.runs.environment import installed

        say(f"apportion {installed('apportion')}\n")
        return 0
    name = argv[0]
    if name not in _COMMANDS:
        near = suggest(name, _COMMANDS) or "; see apportion --help"
        raise InputError(f"there is no command {name!r}{near}")
    command: Callable[[list[str]], Any] = getattr(import_module(_COMMANDS[name][0]), name)
    try:
        result = command(argv[1:])
    except HelpAsked as helped:
        result = str(helped)
    if not isinstance(result, str):
        from apportion.runs.atomic import to_json

        result = to_json(result)
    say(result)
    if not result.endswith("\n"):
        say("\n")
    return 0


@contextmanager
def _only_results_on_stdout() -> Iterator[Callable[[str], None]]:
    """Hand out a way to write results; whatever else writes to standard output meets the logs.

    The switch is made on the file descriptor, so that it holds for libraries and child processes.
    """
    sys.stdout.flush()
    results = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(results), "w", encoding="utf-8") as out:
            yield lambda text: _write(out, text)
    finally:
        sys.stdout.flush()
        os.dup2(results, 1)
        os.close(results)


def _write(out: Any, text: str) -> None:
    out.write(text)
    out.flush()


def _show_warning(message: Any, category: Any, *_: Any) -> None:
    print(f"apportion: warning: {message}", file=sys.stderr)
