"""The settings of a federation to train on, as one frozen dataclass; nothing here starts JAX."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from apportion.domains.settings import Method, ScorerName, TrainingSettings
from apportion.errors import InputError


@dataclass(frozen=True)
class FederatedSettings(TrainingSettings):
    """Learn to aggregate clients' models, in federations of many kinds.

    The defaults suit two cores and small digits; `reduced_size` and `paper_size` are the paper's own
    federation.

    Examples
    --------
    >>> FederatedSettings(kinds="equal,paper").rounds
    20
    """

    mnist: Path | None = None
    """The usual mnist.npz; the embedded 5,000 digits where there is none."""
    learner: Literal["gradient", "ppo"] = "gradient"
    """gradient: direct gradient through the aggregation, over federations of all kinds, for shares
    around FedAvg's with the server's step and momentum; ppo: the paper's policy, on its own split."""
    kinds: str = "all"
    """Kinds of federations to learn from, joined by commas, such as equal,paper+flipped-3 (gradient)."""
    sizes: tuple[int, int] = (10, 10)
    """Clients in the smaller and in the larger federations to learn from (gradient)."""
    method: Method = "mtl"
    """mtl draws kinds uniformly, pmtl those more often that gain least over FedAvg, stl learns from the
    first task alone."""
    copies: int = 3
    """Federations of each kind and size, each with clients of its own (gradient)."""
    server_samples: tuple[int, int] = (20, 200)
    """Fewest and most images of the server's own in an episode (gradient)."""
    pooling: int = 2
    """Side of the squares of pixels that are averaged; 1 keeps 28 x 28."""
    clients: tuple[int, int] = (28, 18)
    """Clients of the universe that see the digits 0-5, and 6-9 (ppo)."""
    seen: tuple[int, int] = (18, 11)
    """Of each, those that training tasks are made of; unseen tasks are made of the others (ppo)."""
    samples: int = 80
    """Images a client holds."""
    task_sizes: tuple[int, int] = (8, 2)
    """Clients of each kind in a task (ppo)."""
    tasks: int = 10
    """Number of training tasks T (ppo)."""
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
    sets: Literal["disjoint", "paper"] = "disjoint"
    """Whether the test set leaves the evaluation set out, or contains it as in the paper."""
    state: str = "invariant"
    """What the policy sees of a client: one of apportion.domains.federated.states.STATES. blind needs no
    images of the server's; accuracy is the paper's."""
    window: int = 5
    """Rounds of it, H."""
    hidden: int = 32
    """Units of the policy's layers."""
    steps: int = 240
    """Updates of the policy."""
    rollouts: int = 2
    """Episodes of a task in an update."""
    together: int = 4
    """Tasks in an update: the one drawn, and others beside it as far as there are (gradient)."""
    relative: bool = True
    """Whether the policy also reads clients relative to each other (gradient)."""
    logarithm: bool = True
    """Whether the loss counts by its logarithm, late rounds as much as early ones (gradient)."""
    learning_rate: float = 1e-2
    """Step size of the policy's Adam."""
    gamma: float = 0.9
    """Discount (ppo)."""
    beta: float = 0.0
    """Correction of the sampling bias (pmtl): none, so that what is drawn more often weighs more."""
    scorer: ScorerName = "reward-variance"
    """What a task is scored by (ppo); with the gradient, by how little it gains over FedAvg."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """In which the clients compute."""
    block: int = 400
    """Images scored at once."""
    chunk: int = 40
    """Steps between two looks at the run: progress, saving, stopping."""

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(
            1, "samples", "unseen", "width", "hidden", "chunk", "copies", "together"
        )
        if self.learner == "gradient" and self.members > 1:
            raise InputError(
                f"members is {self.members}; steps and momenta of several policies are not averaged: "
                "leave it 1, or choose the learner ppo"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"mnist": None if self.mnist is None else self.mnist.name}


def reduced_size(**changes: Any) -> FederatedSettings:
    """The paper's federation and learner, small enough for two cores."""
    sizes = {
        "learner": "ppo", "method": "pmtl", "state": "rich", "model": "convolutional", "width": 8,
        "rounds": 15, "epochs": 2, "unseen": 8, "hidden": 10, "steps": 20, "rollouts": 8, "beta": 1.0,
        "block": 100, "chunk": 4,
    }  # fmt: skip
    return FederatedSettings(**(sizes | changes))


def paper_size(mnist: Path | None, **changes: Any) -> FederatedSettings:
    """The paper's own sizes, for a GPU: 28 x 28 pixels, 600 images a client, 50 rounds."""
    sizes = {
        "mnist": mnist, "pooling": 1, "clients": (60, 40), "seen": (40, 25), "samples": 600,
        "unseen": 4, "width": 32, "rounds": 50, "epochs": 1, "batch": 50, "client_rate": 0.05,
        "evaluation": 1000, "test": 9000, "steps": 24, "precision": "bfloat16", "state": "accuracy",
        "block": 512,
    }  # fmt: skip
    return reduced_size(**(sizes | changes))
