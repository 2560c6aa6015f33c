"""HTML report of a run or a study: one page that opens from disk without network.

`page` defines the elements of a page, `plots` builds its plots, and `run` and `study` read the folders. A
page has a section only for files that exist, so that a run has a page before it is finished.
"""

from pathlib import Path

from apportion.errors import InputError, reading
from apportion.report.page import PAGE_MARK, write_page
from apportion.report.run import RunDomain, run_page
from apportion.report.study import study_page


def write_report(folder: Path, domain: RunDomain | None = None, *, inline: bool = False) -> Path:
    r"""Write `report.html` into the folder of a run or a study.

    Plotly's script, `plotly.min.js`, is written next to a page with plots.

    Parameters
    ----------
    folder : Path
        Folder of a run or a study.
    domain : RunDomain, optional
        Domain of the run, such as `find_domain(load_run(folder).job)`, which adds sections and a glossary.
        Not needed for a study.
    inline : bool
        Whether to put Plotly's script into the page, which is then one file of about 5 MB.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    InputError
        If the folder is neither a run nor a study, or a file in it cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "settings.toml").write_text('job = "budget"')
    >>> _ = (folder / "metrics.csv").write_text("step,reward\n1,0.5\n2,0.6\n")
    >>> write_report(folder).name
    'report.html'
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; pass the folder of a run or a study")
    path = folder / "report.html"
    if path.is_file() and PAGE_MARK not in path.read_bytes():
        raise InputError(f"{path}: was not written by apportion; move it elsewhere")
    # A page reads a dozen files, and an exception does not name the damaged one.
    with reading(folder, "restore the files, or report a bug if they are unchanged"):
        if (folder / "verdict.json").exists():
            text = study_page(folder)
        elif (folder / "settings.toml").exists():
            text = run_page(folder, domain, inline=inline)
        else:
            raise InputError(
                f"{folder}: neither a run nor a study; a run has settings.toml, a study verdict.json"
            )
    write_page(path, text)
    return path
