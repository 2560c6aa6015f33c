"""Settings for training in federations: one frozen dataclass per learner, and a common base class.

This module imports no JAX.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from apportion.domains.settings import Method, ScorerName, TrainingSettings
from apportion.errors import InputError, check_positive

if TYPE_CHECKING:
    from apportion.priority import Priority

_FEDAVG_VARIANCE = 0.005
"""Variance of FedAvg's accuracy over an episode in which it rises from .55 to .90 in 50 rounds."""


@dataclass(frozen=True)
class FederationSettings(TrainingSettings):
    """Settings of both learners: the clients, their training, and the policy's state.

    The defaults suit two cores and small digits.
    """

    images: Path | None = None
    """Image file such as mnist.npz; by default the embedded 5,000 digits."""
    method: Method = "mtl"
    """mtl samples tasks uniformly, pmtl prioritises them (with the learner gradient: those with
    little gain over FedAvg), stl trains on the first task only."""
    pooling: int = 2
    """Side in pixels of the squares that are averaged into one pixel; 1 keeps 28 x 28 pixels."""
    samples: int = 80
    """Images per client."""
    unseen: int = 2
    """Test tasks of each kind."""
    model: Literal["convolutional", "perceptron"] = "perceptron"
    """Model of the clients."""
    width: int = 32
    """Channels of the convolution, or hidden units of the perceptron."""
    rounds: int = 20
    """Rounds per episode."""
    epochs: int = 4
    """Epochs per client and round."""
    batch: int = 20
    """Batch size of the clients' SGD."""
    client_rate: float = 0.15
    """Step size of the clients' SGD."""
    evaluation: int = 200
    """Number of images on which the server scores models."""
    test: int = 1000
    """Number of images on which the aggregate is tested."""
    state: Literal["invariant", "raw", "accuracy", "rich"] = "invariant"
    """State of a client, the policy's input."""
    window: int = 5
    """Rounds of history in the policy's input, H."""
    hidden: int = 32
    """Units of the policy's layers."""
    steps: int = 240
    """Updates of the policy."""
    rollouts: int = 2
    """Episodes per task and update."""
    learning_rate: float = 1e-2
    """Step size of the policy's Adam."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the clients' computations."""
    block: int = 400
    """Number of images that are scored at once."""
    chunk: int = 40
    """Updates between two checkpoints, at which the run reports progress, is saved and can stop."""

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "samples", "unseen", "width", "hidden", "chunk")
        check_positive(learning_rate=self.learning_rate)
        self.check_at_least(1, "rounds", "epochs", "batch", "evaluation", "test", "window", "block")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serialisable values."""
        return asdict(self) | {"images": None if self.images is None else self.images.name}


@dataclass(frozen=True)
class GradientSettings(FederationSettings):
    """Learn to aggregate clients' models, in federations of many kinds.

    Shares relative to FedAvg's, server step and momentum are learned by direct gradient through the
    aggregation.
    """

    learner: Literal["gradient"] = "gradient"
    """gradient: direct gradient through the aggregation, over federations of all kinds; ppo: the
    paper's policy, on the paper's split."""
    state: Literal["invariant"] = "invariant"
    """State of a client, the policy's input."""
    kinds: str = "all"
    """Kinds of training federations, separated by commas, such as equal,paper+flipped-3."""
    sizes: tuple[int, int] = (10, 10)
    """Numbers of clients in small and in large training federations."""
    copies: int = 3
    """Training federations of each kind and size, with separate clients."""
    server_samples: tuple[int, int] = (20, 200)
    """Smallest and largest number of the server's images in an episode."""
    together: int = 4
    """Tasks per update: the sampled task and others, at most all."""
    relative: bool = True
    """Whether the policy also reads each channel standardised over the clients."""
    logarithm: bool = True
    """Whether to minimise the log of the loss, so that late rounds count as much as early ones."""
    beta: float = 0.0
    """Exponent of the importance weights (pmtl); 0 gives frequently sampled tasks more weight."""

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
    """Learn to aggregate clients' models as in the paper: PPO, on the paper's split of the digits.

    `reduced_size` and `paper_size` return settings of the paper's federation.
    """

    learner: Literal["ppo"] = "ppo"
    """ppo: the paper's policy, on the paper's split; gradient: direct gradient through the
    aggregation, over federations of all kinds."""
    state: Literal["raw", "accuracy", "rich"] = "accuracy"
    """State of a client: raw is the accuracy of its model, as in the paper; accuracy is the scaled
    difference of raw from the mean over the clients; rich adds the accuracy by class."""
    clients: tuple[int, int] = (28, 18)
    """Numbers of clients with the digits 0-5 and with 6-9."""
    seen: tuple[int, int] = (18, 11)
    """Numbers of these clients in training tasks; the others are in unseen tasks."""
    task_sizes: tuple[int, int] = (8, 2)
    """Numbers of clients of the two groups in a task."""
    unlike: bool = False
    """Whether tasks have 1 to 4 clients of the second group, and clients their own label mixes."""
    tasks: int = 10
    """Number of training tasks T."""
    sets: Literal["disjoint", "paper"] = "disjoint"
    """Whether the test set excludes the evaluation set, or contains it as in the paper."""
    gamma: float = 0.9
    """Discount factor."""
    scorer: ScorerName = "reward-variance"
    """Score of a task."""

    def priority(self, first_score: float | None = None) -> "Priority":
        """Return the task sampler; the default initial score is on the scale of the scorer."""
        usual = _FEDAVG_VARIANCE if self.scorer == "reward-variance" else 1.0
        return super().priority(usual if first_score is None else first_score)


def reduced_size(**changes: Any) -> PPOSettings:
    """Return the settings of the paper's federation and learner, reduced in size for two cores.

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
