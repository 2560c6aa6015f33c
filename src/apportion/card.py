"""Whether what is traced now will run on a graphics card, for what a card computes another way."""

import jax


def on_card() -> bool:
    """Whether programs are compiled for a graphics card here and now.

    >>> with jax.default_device("cpu"):
    ...     on_card()
    False
    """
    # A device, its platform's name, or None.
    asked = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return (getattr(asked, "platform", asked) or jax.default_backend()) in ("gpu", "cuda")
