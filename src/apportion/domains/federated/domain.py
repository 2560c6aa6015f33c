"""Federated learning as a domain: settings, certificates and the page of a run.

A certificate is made from a run, in unseen federations, or from the file of a Flower server. There a
round's gain is the difference of the policy's and FedAvg's models, made from the same replies, in the mean
probability of the right answer to samples that the policy does not see. Rounds of one federation are
autocorrelated: bet on blocks of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from apportion.domains.domain import Demonstration, Domain
from apportion.domains.federated.settings import FederationSettings, GradientSettings, PPOSettings
from apportion.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from apportion.certify.certificate import Gains
    from apportion.report.page import Section
    from apportion.runs.folder import Run
    from apportion.runs.progress import Progress
    from apportion.runs.runner import PreparedJob

_FEDAVG = "FedAvg"
MAX_GAIN = 0.25
"""Cap on the gain of a federation or a round: 25 points of accuracy."""


@dataclass(frozen=True)
class CertifyOptions:
    """Options of a certificate of a federated run."""

    data: Path | None = None
    """A file such as the usual mnist.npz, whose images the clients hold; else the run's own."""
    bound: float | None = None
    """What a federation's gain, or a round's, counts at most: 0.25 of accuracy by default. Decide on it
    before you look."""
    federations: int | None = None
    """Federations to try it in, 40 by default; more go on from the same first ones."""


class FederatedDomain(Domain):
    """Share the average of a round's models out among the clients that sent them."""

    name = "federated"
    settings = GradientSettings
    variants: ClassVar = {"gradient": GradientSettings, "ppo": PPOSettings}
    certify_options = CertifyOptions
    live_file = "the file that a Flower server keeps"
    examples = ("certify server.safetensors --against FedAvg --block 5",)

    def prepare(self, settings: FederationSettings) -> "PreparedJob":
        from apportion.domains.federated.data import kinds_of, read_digits

        digits = read_digits(settings)
        if isinstance(settings, GradientSettings):
            kinds_of(settings.kinds)
        # JAX starts here, after the user's own mistakes are refused.
        from apportion.domains.federated.evaluation import prepare_mixture, prepare_paper

        if isinstance(settings, PPOSettings):
            return prepare_paper(settings, digits)
        assert isinstance(settings, GradientSettings)
        return prepare_mixture(settings, digits)

    def gains(self, source: "Run | Path", against: str, options: CertifyOptions) -> "Gains":
        bound = MAX_GAIN if options.bound is None else options.bound
        if isinstance(source, Path):
            for name in ("data", "federations"):
                if getattr(options, name) is not None:
                    raise InputError(
                        f"{source}: a server's file, which reads no --{name}; leave it out"
                    )
            return _kept_gains(source, against, bound)
        settings = self.load_settings(source)
        settings = settings if options.data is None else replace(settings, images=options.data)
        from apportion.domains.federated.data import read_digits

        digits = read_digits(settings)
        from apportion.domains.federated.evaluation import federation_gains
        from apportion.runs.policy_file import load_about

        about = load_about(source.folder)
        count = 40 if options.federations is None else options.federations
        return federation_gains(
            source.policy, about, settings, digits, against, federations=count, max_gain=bound
        )

    def demonstrate(self, seed: int, progress: "Progress") -> Demonstration:
        from apportion.domains.federated.demonstration import demonstrate_federated

        return demonstrate_federated(seed, progress)

    def sections(self, folder: Path) -> "list[Section]":
        from apportion.report.page import Section
        from apportion.report.plots import lines, read_table

        tested = read_table(folder, "accuracy", indexed=True)
        if tested is None:
            return []
        last = tested.iloc[-1].sort_values(ascending=False)
        words = ", ".join(f"{name} {accuracy:.1%}" for name, accuracy in last.items())
        plot = lines(
            "Test accuracy by round",
            f"In the last round: {words}.",
            tested.rename_axis(str(tested.index.name or "round")),
            {"title": "test accuracy (% of images)", "kind": "percent"},
            first=("learned",),
            drawn=list(tested.columns),
        )
        lead = "On images that are in no client's hands and in no evaluation set."
        return [Section("Accuracy", [plot], lead)]


def round_gains(values: "Sequence[float] | np.ndarray", max_gain: float = MAX_GAIN) -> "Gains":
    """Gains over FedAvg in the rounds of a federation; NaN if a round has none."""
    import numpy as np

    from apportion.certify.certificate import Gains

    given = np.asarray(values, float)
    return Gains.within(
        given, max_gain, baseline=_FEDAVG, period="round", unit="the right answer", block=5
    )


def _kept_gains(path: Path, against: str, max_gain: float) -> "Gains":
    """Read the gains from the file of `LearnedAggregation(checkpoint_path=...)`."""
    from apportion.runs.files import read_arrays

    if against.lower() != _FEDAVG.lower():
        raise InputError(
            f"{path}: a federation's server compares with {_FEDAVG} alone, not with {against!r}"
        )

    def is_gain(value: Any) -> bool:
        return value is None or (isinstance(value, int | float) and abs(value) <= 1)

    gains = read_arrays(path)[1].get("gains")
    if not isinstance(gains, list) or not all(is_gain(gain) for gain in gains):
        raise InputError(
            f"{path}: holds no gains of a federation; give the file that "
            "LearnedAggregation(checkpoint_path=...) writes, or the folder of a run"
        )
    return round_gains([math.nan if gain is None else gain for gain in gains], max_gain)


DOMAIN = FederatedDomain()
