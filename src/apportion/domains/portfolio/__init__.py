"""Portfolios: allocate wealth to instruments in every period.

The names of `__init__.pyi` are imported on first use, so that checking a price file does not import JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
