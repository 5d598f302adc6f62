# Copyright Spack Project Developers. See COPYRIGHT file for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHpcpace(PythonPackage):
    """Traces, explains and paces distributed training on Slurm clusters."""

    homepage = "https://github.com/hpcpace/hpcpace"
    pypi = "hpcpace/hpcpace-0.1.0.tar.gz"

    license("Apache-2.0 AND MIT")

    # The checksum is that of the first release.
    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    variant("train", default=False, description="Run hpcpace train and probe: torch and MPI")

    depends_on("cxx", type="build")
    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    with default_args(type=("build", "run")):
        depends_on("py-click@8.1:")
        depends_on("py-h5py@3.10:")
        depends_on("py-markupsafe@2.1:")
        depends_on("py-msgspec@0.18:")
        depends_on("py-numpy@1.26:")
        depends_on("py-psutil@5.9:")
        depends_on("py-rich@13.7:")
        depends_on("py-zlib-ng@0.4:")

        with when("+train"):
            depends_on("py-mpi4py@4.0:")
            depends_on("py-safetensors@0.4:")
            depends_on("py-torch@2.4:+distributed")

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def kernels_are_compiled(self):
        """Fail where the compiler gave no kernels: reports would take longer."""
        check = "from hpcpace.metrics.kernels import library; assert library() is not None"
        with working_dir("/"):
            python("-c", check)
