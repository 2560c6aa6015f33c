"""The folder of a run: settings, environment, metrics, checkpoints, policy and results.

    settings.toml           the settings, to run it again
    environment.json        versions, device, seed, fingerprint of the data
    choice.json             the choices made before training, if the job makes any
    metrics.parquet/        one row per recorded step, one part per chunk; for `pandas.read_parquet`
    probabilities.parquet/  probability of each task, one row per chunk
    checkpoints/            the newest states
    policy.safetensors      arrays of the trained policy
    policy.json             class and constructor arguments of the trained policy
    headline.json           the first lines of the report: title, subtitle, cards, text
    SHA256SUMS              checksums of these files, for `sha256sum -c SHA256SUMS`
    results.json            the measured results; written last, so a run that has it is finished

Rows are written before the checkpoint of the same step. A resumed run first removes the rows after
its checkpoint, so that no row is lost or duplicated.
"""

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apportion.errors import InputError
from apportion.runs.files import (
    checksummed,
    pack,
    pack_rows,
    read_arrays,
    read_json,
    read_rows,
    require_free,
    write_atomic,
    write_checked,
    write_json,
)
from apportion.runs.settings import read_toml, to_toml

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from apportion.policy import Policy

UNFINISHED = ("environment.json",)
"""Files of a run that was killed before its settings were written."""
_KEPT_CHECKPOINTS = 3
"""Number of checkpoints to keep; if the newest is damaged, the previous one is used."""


@dataclass(frozen=True)
class Run:
    """Read and write the folder of a run.

    Examples
    --------
    >>> import tempfile
    >>> from apportion.domains.budget.settings import BudgetSettings
    >>> folder = Path(tempfile.mkdtemp()) / "run"
    >>> run = Run.create(folder, "budget", BudgetSettings(), {"seed": 0})
    >>> load_run(folder).job, load_run(folder).finished
    ('budget', False)
    """

    folder: Path

    @classmethod
    def create(cls, folder: Path, job: str, settings: Any, environment: dict[str, Any]) -> "Run":
        """Create a run in a new or empty folder."""
        folder = Path(folder)
        require_free(folder, unfinished=UNFINISHED)
        # Settings are written last: a folder that has them is a complete run.
        write_json(folder / "environment.json", environment)
        write_atomic(folder / "settings.toml", to_toml(settings, job).encode())
        return cls(folder)

    @property
    def job(self) -> str:
        """Name of the domain."""
        return str(read_toml(self.folder / "settings.toml").get("job"))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as plain values."""
        content = read_toml(self.folder / "settings.toml")
        return {name: value for name, value in content.items() if name != "job"}

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, device, seed and data."""
        found = read_json(self.folder / "environment.json")
        if not isinstance(found, dict) or not {"data", "versions"} <= found.keys():
            raise InputError(
                f"{self.folder / 'environment.json'}: has no versions or data, so it is not the file "
                "that the run wrote; restore it, or train in another folder"
            )
        return found

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return (self.folder / "results.json").exists()

    @property
    def results(self) -> dict[str, Any]:
        """The measured results of the trained policy."""
        self._require_finished()
        return read_json(self.folder / "results.json")

    @property
    def metrics(self) -> "pd.DataFrame":
        """Metrics, with one row per recorded step."""
        return self.table("metrics")

    @property
    def policy(self) -> "Policy":
        """The trained policy."""
        from apportion.runs.policy_file import load_policy

        self._require_finished()
        return load_policy(self.folder)

    def _require_finished(self) -> None:
        if not self.finished:
            raise InputError(
                f"{self.folder}: the run is not finished; continue it with "
                f"`apportion resume {self.folder}`"
            )

    def table(self, name: str) -> "pd.DataFrame":
        """Return a table that was written in chunks, in the order of the steps."""
        import pandas as pd

        parts = sorted((self.folder / f"{name}.parquet").glob("step-*.parquet"))
        frames = [read_rows(part, "restore it from a copy") for part in parts]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def write_rows(self, name: str, step: int, frame: "pd.DataFrame") -> None:
        """Append the rows of a chunk to a table, or replace those of the same chunk."""
        part = f"{name}.parquet/{_part(step, 'parquet')}"
        write_checked(self.folder, part, pack_rows(frame))

    def write_choice(self, choice: dict[str, Any]) -> None:
        """Save the choices made before training."""
        with checksummed(self.folder, "choice.json"):
            write_json(
                self.folder / "choice.json", {"settings": self._settings_digest(), "choice": choice}
            )

    @property
    def choice(self) -> dict[str, Any] | None:
        """The choices made before training, or None."""
        path = self.folder / "choice.json"
        if not path.exists():
            return None
        kept = read_json(path)
        if not isinstance(kept, dict) or not isinstance(kept.get("choice"), dict):
            raise InputError(f"{path}: contains no choice; remove it, and resuming chooses again")
        self._require_same_settings(kept, path)
        return kept["choice"]

    def write_checkpoint(
        self, step: int, arrays: "dict[str, np.ndarray]", about: dict[str, Any]
    ) -> None:
        """Save a state, then delete all but the newest `_KEPT_CHECKPOINTS`."""
        about = about | {"step": step, "settings": self._settings_digest()}
        part = f"{self._checkpoints.name}/{_part(step, 'safetensors')}"
        write_checked(self.folder, part, pack(arrays, about))
        for old in sorted(self._checkpoints.glob("step-*.safetensors"))[:-_KEPT_CHECKPOINTS]:
            old.unlink()

    def newest_checkpoint(self) -> "tuple[int, dict[str, np.ndarray], dict[str, Any]] | None":
        """Return step, arrays and description of the newest valid checkpoint; warn of damaged ones."""
        for path in sorted(self._checkpoints.glob("step-*.safetensors"), reverse=True):
            try:
                arrays, about = read_arrays(path)
            except InputError as error:
                warnings.warn(f"skipped a damaged checkpoint: {error}", stacklevel=2)
                continue
            self._require_same_settings(about, path)
            if about.get("step") != _step(path):
                raise InputError(f"{path}: is not the checkpoint of its step; remove it")
            return about["step"], arrays, about
        return None

    def truncate_after(self, step: int) -> None:
        """Remove rows and checkpoints after a step."""
        tables = self.folder.glob("*.parquet/step-*.parquet")
        for part in [*tables, *self._checkpoints.glob("step-*.safetensors")]:
            if _step(part) > step:
                part.unlink()

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _require_same_settings(self, saved: dict[str, Any], path: Path) -> None:
        if saved.get("settings") != self._settings_digest():
            raise InputError(
                f"{self.folder / 'settings.toml'}: was changed since {path.name} was saved; "
                "restore it, or train in another folder with --config"
            )

    def _settings_digest(self) -> str:
        return hashlib.sha256((self.folder / "settings.toml").read_bytes()).hexdigest()


def _part(step: int, suffix: str) -> str:
    return f"step-{step:09d}.{suffix}"


def _step(part: Path) -> int:
    """Return the step in the name of a file."""
    number = part.stem.removeprefix("step-")
    if not (number.isascii() and number.isdecimal()):
        raise InputError(f"{part}: is not a file of the run; move it elsewhere")
    return int(number)


def load_run(folder: Path | str) -> Run:
    """Open the folder of a run, to inspect it or to use its policy.

    Parameters
    ----------
    folder : path
        A folder that `apportion train` created.

    Returns
    -------
    Run
        The run, with `policy`, `metrics`, `results`, `settings` and `environment`.

    Raises
    ------
    InputError
        If the folder does not exist or contains no run.

    Examples
    --------
    >>> import tempfile
    >>> from apportion.domains.budget.settings import BudgetSettings
    >>> folder = Path(tempfile.mkdtemp()) / "run"
    >>> created = Run.create(folder, "budget", BudgetSettings(seed=3), {})
    >>> load_run(folder).settings["seed"]
    3
    """
    folder = Path(folder)
    if not (folder / "settings.toml").is_file():
        reason = "contains no run" if folder.is_dir() else "no such folder"
        raise InputError(f"{folder}: {reason}; pass a folder created by `apportion train`")
    return Run(folder)
