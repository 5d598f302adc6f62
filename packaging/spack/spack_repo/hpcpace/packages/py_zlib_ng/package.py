# Copyright Spack Project Developers. See COPYRIGHT file for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyZlibNg(PythonPackage):
    """zlib and gzip of Python by zlib-ng, the source of which is in the package."""

    homepage = "https://github.com/pycompression/python-zlib-ng"
    pypi = "zlib-ng/zlib_ng-1.1.0.tar.gz"

    license("PSF-2.0")

    version("1.1.0", sha256="08a3a8468d4f130e3dc80d28ec42fcc7a878a57dfed616233e791066327d78a3")

    depends_on("c", type="build")
    depends_on("gmake", type="build")
    depends_on("python@3.9:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-setuptools-scm@8:", type="build")
