"""TensorBoard event files of a run: the means of every chunk, in addition to the run's tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from apportion.errors import optional_import

if TYPE_CHECKING:
    from apportion.training import Chunk

_SHOWN = ("reward", "loss", "deviation", "score", "gradient_norm", "weight")


class Events:
    """Writes chunks as scalars under `tensorboard/` in a run's folder."""

    def __init__(self, folder: Path, step: int = 0):
        otherwise = " or leave --tensorboard out"
        with optional_import("TensorBoard event files need tensorboardX", "tensorboard", otherwise):
            from tensorboardX import SummaryWriter
        # The reader drops steps after `step` that a killed run had written already.
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def write(self, chunk: "Chunk") -> None:
        """Add one chunk's means."""
        for name in _SHOWN:
            self._writer.add_scalar(name, chunk.metrics[name].to_numpy().mean(), chunk.step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()
