"""Builds what is compiled where a C++ compiler is at hand, and adds the guide.

That are the kernels of the report, the handler of aborts, the clocks of a lab's hosts, and the observing layer. None is
needed. The layer of hpcpace/observe/collectives/observer.py needs torch as well; `pip install` builds in isolation,
where torch is not, and hpcpace then observes with its layer in Python. To build it, use
`pip install --no-build-isolation .`, or in a checkout `python setup.py build_ext --inplace`.
"""

from __future__ import annotations

import re
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

KERNELS = "hpcpace/metrics/kernels.cpp"
ABORTS = "hpcpace/observe/aborts.cpp"
CLOCK = "hpcpace/lab/host_clock.cpp"
LAYER = "hpcpace/observe/collectives/layer.cpp"


def source_check(source: str) -> tuple[str, str]:
    """Return the macro by which a library is known to be of its source as it is."""
    return "SOURCE_CHECK", f"{zlib.crc32(Path(source).read_bytes())}u"


def plain(source: str, *options: str, links: Sequence[str] = ()) -> Extension:
    """Return a library, see hpcpace/core/compat.py, which needs neither Python nor numpy to be built."""
    path = Path(source)
    return Extension(
        f"{'.'.join(path.parent.parts)}._{path.stem}",
        [source],
        define_macros=[source_check(source)],
        extra_compile_args=["-std=c++20", "-g0", *options],
        extra_link_args=[*links],
        language="c++",
        optional=True,
        py_limited_api=True,
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


class WithGuide(build_py):
    """Adds the pages of docs to a wheel, as hpcpace/guide, for `hpcpace help`."""

    def run(self) -> None:
        """Copy the packages, and the pages unless they are read where they are."""
        super().run()
        guide = Path(self.build_lib, "hpcpace", "guide")
        shutil.rmtree(guide, ignore_errors=True)  # pages of an earlier build
        for page in Path("docs").rglob("*.md") if not self.editable_mode else ():
            target = guide / page.relative_to("docs")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, target)


of_torch = layers()
# One wheel fits each Python from 3.11 on, but for that with a layer, which fits one Python and one torch.
options = {} if of_torch else {"bdist_wheel": {"py_limited_api": "cp311"}}
# Multiplications and additions fused would round otherwise than numpy.
kernels = plain(KERNELS, "-O3", "-fwrapv", "-ffp-contract=off")
# Every process of a lab loads it, so it must not bring a libstdc++ that is older than a program's own.
clock = plain(CLOCK, "-fno-exceptions", links=["-Wl,--as-needed", "-ldl"])
setup(ext_modules=[kernels, plain(ABORTS), clock, *of_torch], cmdclass={"build_py": WithGuide}, options=options)
