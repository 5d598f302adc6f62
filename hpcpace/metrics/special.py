"""Functions of `scipy.special`, without the package around them.

They are compiled functions on arrays. `import scipy.special` would wrap them for the arrays of other libraries first,
which takes as long as a small report.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["bdtrc", "betainc", "gammaincc", "gammaln", "ndtri", "pdtr", "pdtrc", "stdtr", "stdtrit"]

if TYPE_CHECKING:
    from scipy.special import bdtrc, betainc, gammaincc, gammaln, ndtri, pdtr, pdtrc, stdtr, stdtrit
else:

    def _compiled() -> ModuleType:
        """Return the module of compiled functions; the whole package where it cannot be loaded alone."""
        package, found = "scipy.special", find_spec("scipy.special")
        if package in sys.modules or found is None:
            return import_module(package)
        sys.modules[package] = alone = ModuleType(package)
        alone.__path__ = found.submodule_search_locations
        try:
            return import_module(f"{package}._ufuncs")
        except (ImportError, AttributeError):
            del sys.modules[package]
            return import_module(package)
        finally:
            if sys.modules.get(package) is alone:
                del sys.modules[package]  # whoever needs all of it can still import it

    _functions = _compiled()
    bdtrc, betainc, gammaincc = _functions.bdtrc, _functions.betainc, _functions.gammaincc
    gammaln, ndtri, pdtr, pdtrc = _functions.gammaln, _functions.ndtri, _functions.pdtr, _functions.pdtrc
    stdtr, stdtrit = _functions.stdtr, _functions.stdtrit
