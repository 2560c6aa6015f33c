"""One self-contained HTML page for a run or a study, opened from disk with no network.

`page` is the paper, `plots` are the pictures on it, `run` and `study` say what their folders hold. A
section is written for what is there and for nothing else, so that a young run has an honest page, too.
"""

from pathlib import Path

from apportion.errors import InputError, first_line
from apportion.runs.files import write_atomic


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a run or a study, and say where it is.

    Raises
    ------
    InputError
        The folder is neither, or a file in it cannot be read.
    """
    # The pages ask the domains, which stand above the paper and the pictures.
    from apportion.report.run import run_page
    from apportion.report.study import study_page

    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give the folder of a run or a study")
    try:
        if (folder / "verdict.json").exists():
            content = study_page(folder).encode()
        elif (folder / "settings.toml").exists():
            content = run_page(folder).encode()
        else:
            raise InputError(
                f"{folder}: neither a run nor a study; a run holds settings.toml, a study verdict.json"
            )
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # Which file it is cannot be told from here: a page reads a dozen.
        raise InputError(
            f"{folder}: what it holds makes no page ({type(error).__name__}: {first_line(error)}); put "
            "back what the run or the study wrote, and if this is it, please report a bug"
        ) from error
    path = folder / "report.html"
    write_atomic(path, content)
    return path
