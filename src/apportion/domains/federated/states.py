"""What the server shows the policy of each client, x_{i,n} = f(v_{i,n}): never the data.

The paper's state is the accuracy of the client's model on the server's evaluation set. Richer ones,
still equivariant, tell the clients apart when accuracies no longer do: accuracy by class, and the
size and direction of the update.
"""

from abc import abstractmethod

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from apportion.errors import InputError

Channels = Float[Array, "entities channels"]


class Submission(eqx.Module):
    """A round's models as the server scores them."""

    correct: Float[Array, "entities classes"]
    """The part of the evaluation set that is of a class and rightly classified."""
    frequency: Float[Array, " classes"]
    """The part of the evaluation set that is of a class."""
    updates: Float[Array, "entities parameters"]
    """Each model less the aggregate it started from."""
    mask: Bool[Array, " entities"]

    def centred(self, values: Channels) -> Channels:
        """Values less their mean over the clients: what sets a client apart."""
        mask = self.mask[:, None]
        mean = jnp.where(mask, values, 0.0).sum(0) / mask.sum()
        return jnp.where(mask, values - mean, 0.0)


class ClientState(eqx.Module):
    """One round's channels of each client."""

    @abstractmethod
    def channels(self, classes: int) -> int:
        """How many channels a client shows."""

    @abstractmethod
    def __call__(self, submission: Submission) -> Channels:
        """The channels of every client."""


class RawAccuracy(ClientState):
    """The accuracy of each model on the evaluation set: the paper's state to the letter."""

    def channels(self, classes: int) -> int:
        return 1

    def __call__(self, submission: Submission) -> Channels:
        return jnp.where(submission.mask[:, None], submission.correct.sum(-1, keepdims=True), 0.0)


class Accuracy(ClientState):
    """5 (accuracy - mean over the clients), which learns faster than the raw accuracy."""

    def channels(self, classes: int) -> int:
        return 1

    def __call__(self, submission: Submission) -> Channels:
        return 5 * submission.centred(submission.correct.sum(-1, keepdims=True))


class ClassAccuracy(ClientState):
    """The accuracy on each class less its mean over the clients."""

    def channels(self, classes: int) -> int:
        return classes

    def __call__(self, submission: Submission) -> Channels:
        share = jnp.maximum(submission.frequency, 1e-6)
        return submission.centred(submission.correct / share[None, :])


class UpdateGeometry(ClientState):
    """The log norm of each update and its cosine with the mean update, centred."""

    def channels(self, classes: int) -> int:
        return 2

    def __call__(self, submission: Submission) -> Channels:
        updates = jnp.where(submission.mask[:, None], submission.updates, 0.0)
        mean = updates.sum(0) / submission.mask.sum()
        norms = jnp.linalg.norm(updates, axis=-1) + 1e-12
        cosines = (
            jnp.matmul(updates, mean, precision="highest") / norms / (jnp.linalg.norm(mean) + 1e-12)
        )
        return submission.centred(5 * jnp.stack([jnp.log(norms), cosines], -1))


class Joint(ClientState):
    """Several states side by side."""

    parts: tuple[ClientState, ...]

    def channels(self, classes: int) -> int:
        return sum(part.channels(classes) for part in self.parts)

    def __call__(self, submission: Submission) -> Channels:
        return jnp.concatenate([part(submission) for part in self.parts], -1)


STATES: dict[str, ClientState] = {
    "accuracy": Accuracy(),
    "raw-accuracy": RawAccuracy(),
    "class-accuracy": Joint((Accuracy(), ClassAccuracy())),
    "geometry": Joint((Accuracy(), UpdateGeometry())),
    "rich": Joint((Accuracy(), ClassAccuracy(), UpdateGeometry())),
}


def client_state(name: str) -> ClientState:
    """The state of that name."""
    if name not in STATES:
        raise InputError(f"client state {name!r} is not known; choose one of {sorted(STATES)}")
    return STATES[name]
