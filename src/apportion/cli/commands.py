"""The commands: plain functions, or functions that `make_NAME` builds for the arguments of a call.

Functions built by `make_NAME` have the options of a domain, given by name or by its run. A command checks
its arguments before it imports modules that start JAX, so that mistakes are reported at once. It returns
the text to print or, with `--json`, plain values.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Dict

from apportion.cli.options import (
    File,
    Folder,
    Json,
    Out,
    Quiet,
    RunFolder,
    Seed,
    all_domains,
    domain_of,
    examples,
    finished_run,
    option_kinds,
    refuse_fractions,
    value_of,
    with_options,
)
from apportion.domains.domain import Domain, PlottedResult, Result, find_domain
from apportion.domains.settings import check_seed
from apportion.errors import InputError
from apportion.runs.files import (
    checksummed,
    only_writer,
    require_free,
    require_new,
    require_writable,
    write_atomic,
    write_figure,
    write_json,
)
from apportion.runs.folder import UNFINISHED, load_run
from apportion.runs.progress import Progress, open_progress
from apportion.runs.settings import read_settings, read_toml
from apportion.runs.signals import stoppable

Command = Callable[..., Any] | App

_DEMO_PAGE = "index.html"
"""File that `demo` writes."""
_TRAIN = """The folder contains everything about the run: settings, metrics, checkpoints, policy.
Options on the command line take precedence over --config, and --config over the defaults.
Ctrl-C saves the state, and `apportion resume DIR` continues exactly there."""


def make_train(arguments: Sequence[str]) -> Command:
    """Build `train NAME` for the named domain, or for all domains in the help."""
    named = [find_domain(arguments[0])] if arguments and arguments[0][:1] != "-" else all_domains()
    shown = examples("train", all_domains(), "train NAME --out runs/first")
    app = App(name="train", help=f"Train a policy and save it in a folder.\n\n{shown}")
    for domain in named:
        kind = domain.settings_for(_learner(arguments))
        text = [(kind.__doc__ or "").partition("\n")[0], _TRAIN]
        if domain.variants:
            learners = " or ".join(f"`--learner {learner}`" for learner in domain.variants)
            text.append(f"Each learner has its own options: put {learners} before `--help`.")
        text.append(examples("train", [domain], f"train {domain.name} --out runs/first"))
        config = (refuse_fractions, _settings_file(domain, kind))
        made = App(name=domain.name, help="\n\n".join(text), config=config)
        made.default(_train(domain, kind))
        app.command(made)
    return app


def _learner(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the learner of the command line or of the settings file; empty if neither has one."""
    given, file = value_of("--learner", arguments), value_of("--config", arguments)
    if given is None and file is not None:
        given = read_toml(file).get("learner")
    return {} if given is None else {"learner": given}


def _settings_file(domain: Domain, kind: type) -> Callable[..., None]:
    def apply(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill in from the file of `--config` the options that are not on the command line."""
        for token in arguments["--config"].tokens:
            values = read_settings(token.value, domain.name, kind)
            Dict(values, source=token.value, use_commands_as_keys=False)(app, commands, arguments)

    return apply


def _train(domain: Domain, kind: type) -> Callable[..., Any]:
    """Build the command that trains in one domain, with the fields of its settings as options."""

    def command(
        *,
        out: Out,
        config: File = None,
        json: Json = False,
        quiet: Quiet = False,
        settings: Annotated[kind, Parameter(name="*", group="Settings")] = kind(),  # noqa: B008 # pyright: ignore
    ) -> Any:
        """Train a policy.

        Parameters
        ----------
        out
            New folder of the run.
        config
            TOML file of settings, such as the settings.toml of a run.
        """
        # Save full paths, so that the settings are valid in any working directory.
        values = {field.name: getattr(settings, field.name) for field in fields(settings)}
        paths = {name: path.resolve() for name, path in values.items() if isinstance(path, Path)}
        with open_progress(quiet=quiet) as progress:
            outcome = _start(out, domain, replace(settings, **paths), progress)
        return _trained(out, outcome, json)

    return command


def _start(folder: Path, domain: Domain, settings: Any, progress: Progress) -> Any:
    """Start a run and return its outcome; check folder and data before JAX starts."""
    require_free(folder, unfinished=UNFINISHED)
    prepared = domain.prepare(settings)
    from apportion.runs.runner import start_run

    return start_run(folder, domain.name, settings, prepared, progress)


def _trained(folder: Path, outcome: Any, as_json: bool) -> Any:
    """Return the output of a command that trains; `outcome` is None if the run was already finished."""
    if as_json:
        return {"folder": str(folder), "results": load_run(folder).results}
    if outcome is None:
        return f"the run in {folder} is already finished"
    return f"{outcome.summary}\nwrote {folder}"


def resume_command(folder: Folder, /, *, json: Json = False, quiet: Quiet = False) -> Any:
    """Continue a run exactly where it stopped.

    The results are the same as those of a run without interruption.

    Example: `apportion resume runs/first`

    Parameters
    ----------
    folder
        Folder of the run.
    """
    run, outcome = load_run(folder), None
    if not run.finished:
        domain = find_domain(run.job)
        prepared = domain.prepare(domain.load_settings(run))
        from apportion.runs.runner import resume_run

        with open_progress(quiet=quiet) as progress:
            outcome = resume_run(folder, prepared, progress)
    return _trained(folder, outcome, json)


def make_demo(arguments: Sequence[str]) -> Command:
    """Build `demo` (all installed domains on one page) or `demo NAME` (the demo run of one domain)."""
    if arguments and arguments[0][:1] != "-":
        return _demo_of(find_domain(arguments[0]))

    def command(
        *,
        out: Out = Path("apportion-demo"),
        seed: Seed = 0,
        json: Json = False,
        quiet: Quiet = False,
    ) -> Any:
        """Show the method on embedded data, in minutes on 2 cores: one page for all installed domains.

        Compares single-task, multi-task and prioritised learning, after equally many updates, with the
        usual rule, and prints the path of index.html. With the name of a domain, runs the demo of that
        domain: it trains, tests and saves a policy.

        SHOWN

        Parameters
        ----------
        out
            Folder to write to.
        """
        check_seed(seed)
        require_free(out, unfinished=(_DEMO_PAGE,))
        from apportion.cli.demo import demo_page, demonstrate_all

        with only_writer(out), open_progress(quiet=quiet) as progress:
            found = demonstrate_all(all_domains(), seed, progress)
            report = out / _DEMO_PAGE
            write_atomic(report, demo_page(found).encode())
        return {"report": str(report)} if json else f"wrote {report}"

    shown = "Example: `apportion demo --out runs/demo`\n\n" + examples("demo", all_domains())
    return with_options(command, {}, shown)


def _demo_of(domain: Domain) -> Command:
    """Build the demo run of one domain."""
    chosen = domain.demo()
    if chosen is None:
        raise InputError(f"{domain.name} has no demo run; `apportion demo` shows all domains")

    def command(
        name: str,
        /,
        *,
        out: Out = Path(f"apportion-demo-{domain.name}"),
        seed: Seed = chosen.seed,
        json: Json = False,
        quiet: Quiet = False,
    ) -> Any:
        """Train and test a policy of one domain on embedded data, and write a page.

        Prints the path of report.html. If it is stopped, `apportion resume` continues the run.

        Parameters
        ----------
        name
            The domain.
        out
            New folder to write to.
        """
        with open_progress(quiet=quiet) as progress:
            outcome = _start(out, domain, replace(chosen, seed=seed), progress)
            progress.stage("writing the report")
            from apportion.report import write_report

            report = write_report(out, domain)
        if json:
            return {"report": str(report), "results": load_run(out).results}
        return f"{outcome.summary}\n\nwrote {report}"

    return command


def _for_run(command: str, arguments: Sequence[str], *own: str) -> tuple[Any, dict[str, type], str]:
    """Return the domain of the run in the arguments, the options of the command, and its examples."""
    domain = domain_of(arguments)
    asked = all_domains() if domain is None else [domain]
    return domain, option_kinds(command, asked), examples(command, asked, *own)


def make_backtest(arguments: Sequence[str]) -> Command:
    """Build `backtest DIR` with the options of the run's domain."""
    return _ask_of_run(
        "backtest",
        arguments,
        "backtest runs/first --out tested",
        lambda domain, run, own, progress: domain.backtest(run, own, progress),
        "DIR",
        _check_new_folder,
        _write_folder,
        PURPOSE="Backtest a trained policy and baselines that need no training.",
        WRITTEN="A new folder for the results: JSON, a table and a plot.",
    )


def make_allocate(arguments: Sequence[str]) -> Command:
    """Build `allocate DIR` with the options of the run's domain."""
    return _ask_of_run(
        "allocate",
        arguments,
        "allocate runs/first --json",
        lambda domain, run, own, progress: domain.allocate(run, own),
        "FILE.csv|FILE.json",
        _check_file,
        _write_file,
        PURPOSE="Compute the allocation of a trained policy for the next period.",
        WRITTEN="Also write the result to this new file.",
    )


def _ask_of_run(
    name: str,
    arguments: Sequence[str],
    example: str,
    answer: Callable[[Domain, Any, Any, Progress], Result],
    place: str,
    check: Callable[[Path], None],
    write: Callable[[Any, Path], None],
    **words: str,
) -> Command:
    """Build a command that calls the domain of a run and prints the result, or writes it to `place`."""
    domain, kinds, shown = _for_run(name, arguments, example)

    def command(
        folder: RunFolder,
        /,
        *,
        out: Annotated[Path | None, Parameter(metavar=place)] = None,
        json: Json = False,
        quiet: Quiet = False,
        **options: Any,
    ) -> Any:
        """PURPOSE

        The options are those of the run's domain.

        SHOWN

        Parameters
        ----------
        out
            WRITTEN
        """
        run, own = finished_run(folder, domain), options.get(domain.name)
        if out is not None:
            check(out)
        with open_progress(quiet=quiet) as progress:
            result = stoppable(lambda: answer(domain, run, own, progress))
        if out is not None:
            write(result, out)
        if json:
            return result.to_json()
        return result.summary() + ("" if out is None else f"\nwrote {out}")

    return with_options(command, kinds, shown, **words)


_HALF_WRITTEN = ("table.csv", "figure.png")
"""Files that a killed backtest can leave; the results are written last."""


def _check_new_folder(out: Path) -> None:
    """Raise if the folder has files."""
    require_free(out, unfinished=_HALF_WRITTEN)


def _write_folder(result: PlottedResult, out: Path) -> None:
    """Write the table, the plot and the results of a backtest to a new folder."""
    with only_writer(out):
        _check_new_folder(out)
        _write_file(result, out / "table.csv")
        write_figure(out / "figure.png", result.plot(), dpi=120)
        _write_file(result, out / "results.json")


def _check_file(out: Path) -> None:
    """Raise if a file exists or cannot be written."""
    if out.suffix.lower() not in (".csv", ".json"):
        raise InputError(f"{out}: write to a .csv or a .json file")
    require_new(out)
    require_writable(out.absolute().parent)


def _write_file(result: Result, out: Path) -> None:
    """Write a result as JSON, or its table as CSV."""
    if out.suffix.lower() == ".json":
        write_json(out, result.to_json())
    else:
        write_atomic(out, result.to_frame().to_csv(index=False).encode())


def make_serve(arguments: Sequence[str]) -> Command:
    """Build `serve DIR` with the options of the run's domain."""
    domain, kinds, shown = _for_run("serve", arguments, "serve runs/first")

    def command(folder: RunFolder, /, **options: Any) -> Any:
        """Run a trained policy as a live controller until Ctrl-C.

        The options are those of the run's domain.

        SHOWN
        """
        return domain.serve(finished_run(folder, domain), options.get(domain.name))

    return with_options(command, kinds, shown)


def make_certify(arguments: Sequence[str]) -> Command:
    """Build `certify DIR` with the options of the run's domain."""
    own = "certify runs/first --against NAME"
    domain, kinds, shown = _for_run("certify", arguments, own)

    def command(
        folder: Folder,
        /,
        *,
        against: Annotated[str, Parameter(metavar="NAME")],
        alpha: float = 0.05,
        block: int | None = None,
        out: Annotated[Path | None, Parameter(metavar="DIR")] = None,
        json: Json = False,
        **options: Any,
    ) -> Any:
        """Test whether a policy is better than a baseline: certified, not yet, or harmful.

        Compares policy and baseline on data that the policy was not trained on. Two bets on the gains, one
        that the policy is better and one that it is worse, win at the wealth 2/alpha. Repeat the test as
        often as you like with more data: the probability of a wrong verdict is at most alpha over all
        repetitions together. The options are those of the run's domain.

        SHOWN

        Parameters
        ----------
        folder
            Folder of a finished run.
        against
            Name of the baseline, or the folder of another run.
        alpha
            Probability of a wrong verdict, between 0 and 1.
        block
            Consecutive periods whose mean is one bet, because gains of neighbouring periods are dependent;
            by default 28 days or 13 weeks.
        out
            Folder for the certificate: JSON, a table and a plot. By default the folder of the run, whose
            earlier certificate is replaced.
        """
        run, own = finished_run(folder, domain), options.get(domain.name)
        bound = getattr(own, "bound", None)
        if not 0 < alpha < 1:
            raise InputError(f"--alpha is {alpha:g}; it must be above 0 and below 1")
        if block is not None and block < 1:
            raise InputError(f"--block is {block}; it must be at least 1 period")
        if bound is not None and not 0 < bound < float("inf"):
            raise InputError(f"--bound is {bound:g}; it must be above 0")
        if out is None:
            out = folder
        else:
            for name in _CERTIFICATE:
                require_new(out / name)
        require_writable(out)
        made = stoppable(lambda: domain.gains(run, against, own).certify(alpha=alpha, block=block))
        plot = out / "certificate.png"
        with checksummed(out, *_CERTIFICATE):
            _write_file(made, out / "certificate.json")
            _write_file(made, out / "certificate.csv")
            write_figure(plot, made.plot(), dpi=130)
        return made.to_json() | {"plot": str(plot)} if json else f"{made.summary()}\nwrote {plot}"

    return with_options(command, kinds, shown)


_CERTIFICATE = ("certificate.json", "certificate.csv", "certificate.png")


def make_study(arguments: Sequence[str]) -> Command:
    """Build `study NAME`."""
    from apportion.studies.registry import (
        Request,
        Scale,
        installed_studies,
        perform,
        study_names,
    )

    # If no package with studies is installed, `perform` reports it.
    names = (*study_names(), "all") if study_names() else None

    def command(
        name: Annotated[str, Parameter(name="NAME", choices=names, show_choices=False)],
        /,
        *,
        out: Out,
        scale: Scale = "quick",
        seed: Seed = 0,
        prices: File = None,
        allow_jumps: tuple[str, ...] | None = None,
        images: File = None,
        draw: bool = False,
        processes: Annotated[int, Parameter(metavar="N")] = 1,
        on: Literal["local", "ray"] = "local",
        address: Annotated[str | None, Parameter(metavar="A")] = None,
        json: Json = False,
        quiet: Quiet = False,
    ) -> Any:
        """Reproduce a figure or claim of the paper: data, table, plot, and a verdict on each claim.

        SHOWN

        Example: `apportion study fig1 --out studies/fig1`

        Parameters
        ----------
        name
            Name of the study, or all.
        out
            Folder to write to; for all, it gets one folder per study.
        scale
            quick takes minutes on 2 cores; paper is the size of the paper, for a GPU.
        prices
            File of daily prices for market studies; by default the 20 embedded stocks.
        allow_jumps
            Accept these price jumps, each as TICKER:DAY; without values, accept all jumps.
        images
            File such as mnist.npz for studies of federations; by default 5,000 embedded digits.
        draw
            Compute nothing; write table, plot and verdicts from the saved cells.
        processes
            Number of processes on this machine; one process seldom fills a GPU.
        on
            Compute on this machine, or on a Ray cluster.
        address
            Address of the Ray cluster; by default RAY_ADDRESS, or a new cluster on this machine.
        """
        begun = time.monotonic()
        check_seed(seed)
        if address is not None and on != "ray":
            raise InputError(f"--address {address} needs --on ray; add it, or omit --address")
        if processes < 1:
            raise InputError(f"processes is {processes}; it must be at least 1")
        if processes > 1 and (on == "ray" or draw):
            other = "--on ray" if on == "ray" else "--draw"
            raise InputError(
                f"--processes {processes} computes on this machine; omit {other} or --processes"
            )
        for folder in [out / study for study in installed_studies()] if name == "all" else [out]:
            require_writable(folder)
            found = sorted(e.name for e in folder.glob("*") if not e.name.startswith("."))
            if found and not {"cells.json", "study.json", "verdict.json"} & set(found):
                raise InputError(
                    f"{folder}: contains other files, such as {found[0]}; choose a new or an empty folder"
                )
        request = Request(
            scale, seed, prices, images, ("all",) if allow_jumps == () else allow_jumps
        )

        from apportion.report import write_report
        from apportion.studies.executors import Processes, Ray, Serial

        executor = Processes(processes) if processes > 1 else Serial()
        executor = Ray(address) if on == "ray" else executor
        verdicts, seconds, lines = {}, {}, []
        with open_progress(quiet=quiet) as progress:
            for done in perform(
                name, out, request, executor=executor, draw=draw, progress=progress.stage
            ):
                verdicts[done.name], seconds[done.name] = done.study.verdicts(), done.seconds
                lines += [done.study.summary(), f"wrote {write_report(done.folder)}"]
        whole = round(time.monotonic() - begun, 1)
        if json:
            content = {"folder": str(out), "studies": verdicts}
            return content | {"seconds": seconds, "seconds_in_all": whole}
        return "\n".join([*lines, f"took {whole:g} s"])

    purposes = "\n".join(
        f"- `{name}`: {study.purpose}" for name, study in installed_studies().items()
    )
    return with_options(command, {}, purposes)


def report_command(folder: Folder, /, *, inline: bool = False, json: Json = False) -> Any:
    """Write one HTML page of a run or a study.

    The page is report.html in the folder, and opens from disk without network. Its plots need
    plotly.min.js, which is written next to it.

    Example: `apportion report runs/first`

    Parameters
    ----------
    folder
        Folder of a run or a study.
    inline
        Embed plotly.min.js in the page, which is then one file of 5 MB.
    """
    from apportion.report import write_report

    path = write_report(folder, domain_of([str(folder)]), inline=inline)
    return {"report": str(path)} if json else f"wrote {path}"


def make_check(arguments: Sequence[str]) -> Command:
    """Build `check` with the file options of all domains."""
    domains = all_domains()

    def command(*, json: Json = False, **options: Any) -> Any:
        """Show versions, devices and extras, and check data files.

        Does not start JAX, so it is fast. An invalid file is reported in one sentence, with exit code 2.

        SHOWN
        """
        from apportion.runs.environment import EXTRAS, devices, installed, versions

        found: dict[str, Any] = {
            "versions": versions(),
            "devices": devices(),
            "extras": {
                extra: {package: installed(package) for package in packages}
                for extra, packages in EXTRAS.items()
            },
        }
        lines = [f"{name:12} {version or 'missing'}" for name, version in found["versions"].items()]
        lines += ["", *(f"device       {device}" for device in found["devices"]), ""]
        for extra, packages in found["extras"].items():
            missing = ", ".join(name for name, version in packages.items() if version is None)
            present = ", ".join(f"{name} {version}" for name, version in packages.items())
            install = f"missing {missing}: pip install 'apportion[{extra}]'"
            lines.append(f"{extra:12} {install if missing else present}")
        for domain in domains:
            own = options.get(domain.name)
            if own is not None and own != type(own)():
                result = domain.check(own)
                found |= result.to_json()
                lines += ["", result.summary()]
        return found if json else "\n".join(lines)

    return with_options(
        command, option_kinds("check", domains), examples("check", domains, "check ")
    )
