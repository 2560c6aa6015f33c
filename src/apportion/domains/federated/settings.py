"""The settings of a federation to train on, as one frozen dataclass; nothing here starts JAX."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from apportion.domains.settings import ScorerName, TrainingSettings


@dataclass(frozen=True)
class FederatedSettings(TrainingSettings):
    """Learn to aggregate the models of ten clients; the defaults suit two cores and small digits.

    Examples
    --------
    >>> FederatedSettings(method="mtl").rounds
    15
    """

    mnist: Path | None = None
    """The usual mnist.npz; the embedded 5,000 digits where there is none."""
    pooling: int = 2
    """Side of the squares of pixels that are averaged; 1 keeps 28 x 28."""
    clients: tuple[int, int] = (28, 18)
    """Clients of the universe that see the digits 0-5, and 6-9."""
    seen: tuple[int, int] = (18, 11)
    """Of each, those that training tasks are made of; unseen tasks are made of the others."""
    samples: int = 80
    """Images a client holds."""
    task_sizes: tuple[int, int] = (8, 2)
    """Clients of each kind in a task."""
    tasks: int = 10
    """Number of training tasks T."""
    unseen: int = 8
    """Tasks to test on."""
    model: Literal["convolutional", "perceptron"] = "convolutional"
    """What a client trains."""
    width: int = 8
    """Channels of the convolution, or hidden units of the perceptron."""
    rounds: int = 15
    """Rounds of an episode."""
    epochs: int = 2
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
    state: str = "rich"
    """What the policy sees of a client: one of apportion.domains.federated.states.STATES. The
    paper's accuracy stops telling clients apart late in a run; rich adds what does."""
    window: int = 5
    """Rounds of it, H."""
    hidden: int = 10
    """Units of the recurrent network."""
    steps: int = 20
    """Updates of the policy."""
    rollouts: int = 8
    """Paired episodes in an update."""
    learning_rate: float = 1e-2
    """Step size of the policy's Adam."""
    gamma: float = 0.9
    """Discount."""
    scorer: ScorerName = "reward-variance"
    """What a task is scored by."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """In which the clients compute."""
    block: int = 100
    """Images scored at once."""
    chunk: int = 4
    """Steps between two looks at the run: progress, saving, stopping."""

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "samples", "unseen", "width", "hidden", "chunk")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"mnist": None if self.mnist is None else self.mnist.name}


def paper_size(mnist: Path | None, **changes: Any) -> FederatedSettings:
    """The paper's own sizes, for a GPU: 28 x 28 pixels, 600 images a client, 50 rounds."""
    sizes = {
        "mnist": mnist, "pooling": 1, "clients": (60, 40), "seen": (40, 25), "samples": 600,
        "unseen": 4, "width": 32, "rounds": 50, "epochs": 1, "batch": 50, "client_rate": 0.05,
        "evaluation": 1000, "test": 9000, "steps": 24, "precision": "bfloat16", "state": "accuracy",
    }  # fmt: skip
    return FederatedSettings(**(sizes | changes))
