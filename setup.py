"""Builds what is compiled where a C++ compiler is at hand: the kernels of the report, and the observing layer.

Neither is needed. The layer of hpcpace/observe/collectives/switched.py needs torch as well; `pip install` builds in
isolation, where torch is not, and hpcpace then observes with its layer in Python. To build it, use `pip install
--no-build-isolation .`, or in a checkout `python setup.py build_ext --inplace`.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from setuptools import Extension, setup

KERNELS = "hpcpace/metrics/kernels.cpp"
LAYER = "hpcpace/observe/collectives/layer.cpp"


def source_check(source: str) -> tuple[str, str]:
    """Return the macro by which a library is known to be of its source as it is."""
    return "SOURCE_CHECK", f"{zlib.crc32(Path(source).read_bytes())}u"


def kernels() -> Extension:
    """Return the kernels of hpcpace/metrics/kernels.py, which need neither Python nor numpy to be built."""
    return Extension(
        "hpcpace.metrics._kernels",
        [KERNELS],
        define_macros=[source_check(KERNELS)],
        # Multiplications and additions fused would round otherwise than numpy.
        extra_compile_args=["-std=c++20", "-O3", "-g0", "-fwrapv", "-ffp-contract=off"],
        language="c++",
        optional=True,
    )


def layers() -> list[Extension]:
    """Return the compiled layer for the torch at hand; nothing without torch."""
    try:
        import torch
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError:
        return []
    # An extension fits one release of torch only. `optional`: what cannot be built is a warning.
    name = f"_layer_{re.sub(r'[^0-9A-Za-z]', '_', torch.__version__)}"
    return [
        Extension(
            f"hpcpace.observe.collectives.{name}",
            [LAYER],
            include_dirs=include_paths(),
            library_dirs=library_paths(),
            libraries=["torch_python", "torch", "torch_cpu", "c10"],
            define_macros=[("TORCH_EXTENSION_NAME", name), source_check(LAYER)],
            extra_compile_args=["-std=c++20", "-g0"],
            language="c++",
            optional=True,
        )
    ]


setup(ext_modules=[kernels(), *layers()])
