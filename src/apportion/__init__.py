"""apportion: learn to share out a resource over time, over every subset of a universe of entities.

The names of `__init__.pyi` are imported on first use: JAX takes a second to import, and the command
line's help should not wait for it.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
