"""The one exception for what the user can fix."""


class InputError(ValueError):
    """Something the user gave is wrong; the message names the thing, the place and the way out."""
