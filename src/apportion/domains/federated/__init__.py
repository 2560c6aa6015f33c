"""Federated learning: share the average of a round's models out among the clients that sent them.

The names of `__init__.pyi` are imported on first use, so that reading settings imports no JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
