"""What a policy gained over FedAvg in each round of a real federation, as its server keeps it.

A round's gain is the difference of both models, made from the same replies, in the mean chance that they
give to the right answer of the samples that the policy does not see. Rounds of one federation hang
together: bet on blocks of them.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apportion.certificate import Gains
from apportion.errors import InputError
from apportion.runs.files import read_arrays

FEDAVG = "FedAvg"
BOUND = 0.25
"""A round's gain counts at 25 points at most."""


def round_gains(values: Sequence[float] | np.ndarray, bound: float = BOUND) -> Gains:
    """Gains over FedAvg in the rounds of a federation, not a number where a round had none."""
    return Gains.within(
        np.asarray(values, float),
        bound,
        baseline=FEDAVG,
        period="round",
        unit="the right answer",
    )


def kept_gains(path: Path, against: str, *, bound: float = BOUND) -> Gains:
    """The gains in the file that a server's `LearnedAggregation(keep=...)` writes.

    Raises
    ------
    InputError
        The file is none of these, or another baseline than FedAvg is asked for.
    """
    if against.lower() != FEDAVG.lower():
        raise InputError(
            f"{path}: a federation's server compares with {FEDAVG} alone, not with {against!r}"
        )
    _, about = read_arrays(path)
    gains = about.get("gains")
    if not isinstance(gains, list) or not all(_is_gain(gain) for gain in gains):
        raise InputError(
            f"{path}: holds no gains of a federation; give the file that LearnedAggregation(keep=...) "
            "writes, or the folder of a run"
        )
    return round_gains([np.nan if gain is None else gain for gain in gains], bound)


def _is_gain(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) <= 1)
