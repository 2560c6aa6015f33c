"""The settings of a federation to train on: one frozen dataclass a learner, over a common base.

Nothing here starts JAX.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from apportion.domains.settings import Method, ScorerName, TrainingSettings
from apportion.errors import InputError, check_positive

if TYPE_CHECKING:
    from apportion.priority import Priority

_FEDAVG_VARIANCE = 0.005
"""Variance of the accuracy over an episode of FedAvg, which rises from .55 to .90 in 50 rounds."""


@dataclass(frozen=True)
class FederationSettings(TrainingSettings):
    """Settings of both learners: the clients, their training, and the policy's state.

    The defaults suit two cores and small digits.
    """

    images: Path | None = None
    """A file such as the usual mnist.npz; the embedded 5,000 digits where there is none."""
    method: Method = "mtl"
    """mtl draws kinds uniformly, pmtl those more often that gain least over FedAvg, stl learns from the
    first task alone."""
    pooling: int = 2
    """Side of the squares of pixels that are averaged; 1 keeps 28 x 28."""
    samples: int = 80
    """Images a client holds."""
    unseen: int = 2
    """Tasks to test on, of each kind."""
    model: Literal["convolutional", "perceptron"] = "perceptron"
    """What a client trains."""
    width: int = 32
    """Channels of the convolution, or hidden units of the perceptron."""
    rounds: int = 20
    """Rounds of an episode."""
    epochs: int = 4
    """Epochs of each client in a round."""
    batch: int = 20
    """Images in a step of the clients' SGD."""
    client_rate: float = 0.15
    """Step size of the clients' SGD."""
    evaluation: int = 200
    """Images the server scores models on."""
    test: int = 1000
    """Images the aggregate is tested on."""
    state: Literal["invariant", "raw", "accuracy", "rich"] = "invariant"
    """What the policy sees of a client."""
    window: int = 5
    """Rounds of it, H."""
    hidden: int = 32
    """Units of the policy's layers."""
    steps: int = 240
    """Updates of the policy."""
    rollouts: int = 2
    """Episodes of a task in an update."""
    learning_rate: float = 1e-2
    """Step size of the policy's Adam."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """In which the clients compute."""
    block: int = 400
    """Images scored at once."""
    chunk: int = 40
    """Steps between two looks at the run: progress, saving, stopping."""

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "samples", "unseen", "width", "hidden", "chunk")
        check_positive(learning_rate=self.learning_rate)
        self.check_at_least(1, "rounds", "epochs", "batch", "evaluation", "test", "window", "block")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"images": None if self.images is None else self.images.name}


@dataclass(frozen=True)
class GradientSettings(FederationSettings):
    """Learn to aggregate clients' models, in federations of many kinds.

    Direct gradient through the aggregation, for shares around FedAvg's with the server's step and
    momentum.
    """

    learner: Literal["gradient"] = "gradient"
    """gradient: direct gradient through the aggregation, over federations of all kinds; ppo: the paper's
    policy, on its own split."""
    state: Literal["invariant"] = "invariant"
    """What the policy sees of a client."""
    kinds: str = "all"
    """Kinds of federations to learn from, joined by commas, such as equal,paper+flipped-3."""
    sizes: tuple[int, int] = (10, 10)
    """Clients in the smaller and in the larger federations to learn from."""
    copies: int = 3
    """Federations of each kind and size, each with clients of its own."""
    server_samples: tuple[int, int] = (20, 200)
    """Fewest and most images of the server's own in an episode."""
    together: int = 4
    """Tasks in an update: the one drawn, and others beside it as far as there are."""
    relative: bool = True
    """Whether the policy also reads clients relative to each other."""
    logarithm: bool = True
    """Whether the loss counts by its logarithm, late rounds as much as early ones."""
    beta: float = 0.0
    """Correction of the sampling bias (pmtl): none, so that what is drawn more often weighs more."""

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "copies", "together")
        for name in ("tasks", "scorer", "members"):
            if (given := getattr(self, name)) != getattr(TrainingSettings, name):
                raise InputError(
                    f"{name} is {given}, which the learner gradient does not read; leave it out, or choose "
                    "the learner ppo"
                )


@dataclass(frozen=True)
class PPOSettings(FederationSettings):
    """Learn to aggregate clients' models as the paper does: PPO, on its own split of the digits.

    `reduced_size` and `paper_size` are the paper's own federation.
    """

    learner: Literal["ppo"] = "ppo"
    """ppo: the paper's policy, on its own split; gradient: direct gradient through the aggregation, over
    federations of all kinds."""
    state: Literal["raw", "accuracy", "rich"] = "accuracy"
    """What the policy sees of a client: raw is the paper's, the accuracy of its models; accuracy is that
    less the mean over the clients, scaled; rich adds the accuracy on each class."""
    clients: tuple[int, int] = (28, 18)
    """Clients of the universe that see the digits 0-5, and 6-9."""
    seen: tuple[int, int] = (18, 11)
    """Of each, those that training tasks are made of; unseen tasks are made of the others."""
    task_sizes: tuple[int, int] = (8, 2)
    """Clients of each kind in a task."""
    unlike: bool = False
    """Whether tasks are unlike: 1 to 4 clients of the second kind, and labels mixed by each client."""
    tasks: int = 10
    """Number of training tasks T."""
    sets: Literal["disjoint", "paper"] = "disjoint"
    """Whether the test set leaves the evaluation set out, or contains it as in the paper."""
    gamma: float = 0.9
    """Discount."""
    scorer: ScorerName = "reward-variance"
    """What a task is scored by."""

    def priority(self, first_score: float | None = None) -> "Priority":
        """Scores begin on the scorer's own scale: beside 1, no variance of accuracies would count."""
        usual = _FEDAVG_VARIANCE if self.scorer == "reward-variance" else 1.0
        return super().priority(usual if first_score is None else first_score)


def reduced_size(**changes: Any) -> PPOSettings:
    """Return the settings of the paper's federation and learner, small enough for two cores.

    Parameters
    ----------
    **changes
        Fields of `PPOSettings` to change.
    """
    sizes = {
        "method": "pmtl", "state": "rich", "model": "convolutional", "width": 8, "rounds": 15,
        "epochs": 2, "unseen": 8, "hidden": 10, "steps": 20, "rollouts": 8, "block": 100,
        "chunk": 4,
    }  # fmt: skip
    return PPOSettings(**(sizes | changes))


def paper_size(images: Path | None, **changes: Any) -> PPOSettings:
    """Return the paper's own sizes, for a GPU: 28 x 28 pixels, 600 images a client, 50 rounds."""
    sizes = {
        "images": images, "pooling": 1, "clients": (60, 40), "seen": (40, 25), "samples": 600,
        "unseen": 4, "width": 32, "rounds": 50, "epochs": 1, "batch": 50, "client_rate": 0.05,
        "evaluation": 1000, "test": 9000, "steps": 24, "precision": "bfloat16", "state": "accuracy",
        "block": 512,
    }  # fmt: skip
    return reduced_size(**(sizes | changes))
