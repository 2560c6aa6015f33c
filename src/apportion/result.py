"""What training gives, and how it shows itself: the policy, the metrics, the state to go on from."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.algorithm import Algorithm, Metrics, RunState
from apportion.policy import Policy


@dataclass(frozen=True)
class Chunk:
    """Where a run stands at a chunk's end: what `on_chunk` is handed."""

    algorithm: Algorithm
    state: RunState
    step: int
    steps: int
    metrics: pd.DataFrame
    """The rows of this chunk."""

    @property
    def policy(self) -> Policy:
        """The policy as it is now (stacked, where there are several runs)."""
        return self.algorithm.policy(self.state)


@dataclass(frozen=True)
class TrainingResult:
    """What training gives: the policy, the metrics, and the state to go on from."""

    policy: Policy
    metrics: pd.DataFrame
    state: RunState = field(repr=False)
    algorithm: Algorithm = field(repr=False)

    @property
    def probabilities(self) -> np.ndarray:
        """Each task's chance to be drawn next (runs by tasks, where there are several runs)."""
        return np.asarray(self._peek(lambda a, s: a.selection.probabilities(s.selection)))

    @property
    def scores(self) -> np.ndarray:
        """Each task's score."""
        return np.asarray(self._peek(lambda a, s: a.selection.scores(s.selection)))

    def _peek(self, function: Callable[[Algorithm, RunState], Any]) -> Any:
        peek = jax.vmap(function, in_axes=(None, 0)) if self.state.step.ndim else function
        return peek(self.algorithm, self.state)

    def to_frame(self) -> pd.DataFrame:
        """The metrics: one row a recorded step."""
        return self.metrics

    def summary(self) -> str:
        """First and last tenth of training, side by side."""
        rows = max(len(self.metrics) // 10, 1)
        columns = ["reward", "loss", "deviation", "gradient_norm", "weight"]
        first = self.metrics[columns].iloc[:rows].mean()
        last = self.metrics[columns].iloc[-rows:].mean()
        table = pd.DataFrame({"first tenth": first, "last tenth": last})
        tasks = len(self.algorithm.tasks)
        drawn = self.metrics["task"].nunique()
        steps = int(np.max(np.asarray(self.state.step)))
        head = f"{steps} steps over {tasks} tasks ({drawn} drawn)"
        return f"{head}\n{table.to_string(float_format=lambda x: f'{x: .4g}')}"

    def plot(self) -> Figure:
        """Reward, deviation from equal shares, score and gradient norm over training."""
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        titles = {
            "reward": "mean reward of the batch",
            "deviation": "deviation from equal shares",
            "score": "score of the drawn task",
            "gradient_norm": "gradient norm",
        }
        for axes, (column, title) in zip(
            figure.subplots(2, 2, sharex=True).flat, titles.items(), strict=True
        ):
            series = pd.Series(self.metrics.groupby("step")[column].mean())
            smooth = series.rolling(max(len(series) // 50, 1), min_periods=1).mean()
            step = series.index.to_numpy()
            axes.plot(step, np.asarray(series), color="0.8", linewidth=0.5)
            axes.plot(step, np.asarray(smooth), color="C0", linewidth=1.5)
            axes.set_title(title, fontsize=10, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
        figure.supxlabel("step", fontsize=10)
        return figure


def metrics_frame(metrics: Metrics, done: int, record_every: int) -> pd.DataFrame:
    """Rows of a chunk; with several runs, a column says whose."""
    columns = {name: np.asarray(getattr(metrics, name)) for name in Metrics.__dataclass_fields__}
    length = columns["loss"].shape[-1]
    step = done + record_every * np.arange(1, length + 1)
    if columns["loss"].ndim == 1:
        return pd.DataFrame({"step": step, **columns})
    runs = columns["loss"].shape[0]
    place = {"run": np.repeat(np.arange(runs), length), "step": np.tile(step, runs)}
    return pd.DataFrame(place | {name: column.reshape(-1) for name, column in columns.items()})
