"""Multi-task reinforcement learning for resource allocation over subsets of a universe of entities.

The names in `__init__.pyi` are imported on first use, because importing JAX takes a second and the help
of the command line does not need it.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
