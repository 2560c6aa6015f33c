"""Federated learning as a domain: settings and the page of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from apportion.domains.domain import Demonstration, Domain
from apportion.domains.federated.settings import FederationSettings, GradientSettings, PPOSettings

if TYPE_CHECKING:
    from apportion.report.page import Section
    from apportion.runs.progress import Progress
    from apportion.runs.runner import PreparedJob


class FederatedDomain(Domain):
    """Choose the weights of the clients' models in the average of each round."""

    name = "federated"
    settings = GradientSettings
    variants: ClassVar = {"gradient": GradientSettings, "ppo": PPOSettings}

    def prepare(self, settings: FederationSettings) -> "PreparedJob":
        from apportion.domains.federated.data import kinds_of, read_digits

        digits = read_digits(settings)
        if isinstance(settings, GradientSettings):
            kinds_of(settings.kinds)
        # This imports JAX, so it follows the validation of the user's files and settings.
        from apportion.domains.federated.evaluation import prepare_mixture, prepare_paper

        if isinstance(settings, PPOSettings):
            return prepare_paper(settings, digits)
        assert isinstance(settings, GradientSettings)
        return prepare_mixture(settings, digits)

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


DOMAIN = FederatedDomain()
