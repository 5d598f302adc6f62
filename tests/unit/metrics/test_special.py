"""The functions of `scipy.special` that metrics use are those of scipy, loaded with the package or without it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import scipy.special

from hpcpace.metrics import special

_NAMES = ("bdtrc", "betainc", "gammaincc", "gammaln", "ndtri", "pdtr", "pdtrc", "stdtr", "stdtrit")


def _printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("name", _NAMES)
def test_gives_what_scipy_gives(name: str) -> None:
    arguments = {"gammaln": (4.5,), "ndtri": (0.3,), "bdtrc": (2, 9, 0.2), "betainc": (2.0, 3.5, 0.4)}
    values = arguments.get(name, (3.0, 0.7))
    assert getattr(special, name)(*values) == getattr(scipy.special, name)(*values)


def test_leaves_the_package_out_and_loadable() -> None:
    code = (
        "import sys; from hpcpace.metrics.special import ndtri; print('scipy.special' in sys.modules);"
        "import scipy.special, scipy.optimize; print(scipy.special.ndtri(0.3) == ndtri(0.3))"
    )
    assert _printed(code).split() == ["False", "True"]


def test_takes_the_package_where_the_functions_cannot_be_loaded_alone() -> None:
    code = (
        "import sys; sys.modules['scipy.special._ufuncs'] = None\n"
        "try: import hpcpace.metrics.special\n"
        "except ImportError as error: print('_ufuncs' in str(error), 'scipy.special' in sys.modules)"
    )
    assert _printed(code).split() == ["True", "False"]
