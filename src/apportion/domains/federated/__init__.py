"""Federated learning: choose the weights of the clients' models in the average of each round.

The names of `__init__.pyi` are imported on first use, so that reading settings imports no JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
