"""The recipes in packaging/ have the version and the dependencies of pyproject.toml, and the base stays small."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

from hpcpace import __version__

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
SPACK = PACKAGING / "spack" / "spack_repo" / "hpcpace"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Names that differ from those at PyPI.
CONDA = {"zlib-ng": "python-zlib-ng", "torch": "pytorch"}
EASYBUILD = {"zlib-ng": "python-zlib-ng", "numpy": "SciPy-bundle", "click": "Python-bundle-PyPI"}
IN_BUNDLE = {"click", "markupsafe", "psutil", "rich"}
MODULES = {"torch", "mpi4py", "safetensors", "matplotlib", "perfetto", "pyarrow", "pandas", "yaml", "pynvml"}
FRAMEWORKS = {"accelerate", "deepspeed", "lightning", "pytorch_lightning", "transformers", "torchvision", "triton"}


def _bounds(requirements: list[str]) -> dict[str, str]:
    return dict(requirement.split(">=") for requirement in requirements)


BASE, TRAIN = _bounds(PROJECT["dependencies"]), _bounds(PROJECT["optional-dependencies"]["train"])
PYTHON = PROJECT["requires-python"].removeprefix(">=")


def test_the_conda_recipe_has_the_dependencies() -> None:
    text = (PACKAGING / "conda-forge" / "recipe.yaml").read_text()
    run, constraints = re.split(r"\n  run_constraints:\n", text.partition("\n  run:\n")[2].partition("\ntests:")[0])
    found = [dict(re.findall(r"^    - (\S+) >=(\S+)$", part, re.MULTILINE)) for part in (run, constraints)]
    assert found == [{CONDA.get(name, name): least for name, least in part.items()} for part in (BASE, TRAIN)]


def test_the_spack_recipe_has_the_dependencies() -> None:
    text = (SPACK / "packages" / "py_hpcpace" / "package.py").read_text()
    base, train = text.partition("default_args")[2].split('when("+train")')
    for part, wanted in ((base, BASE), (train, TRAIN)):
        assert dict(re.findall(r'depends_on\("py-([\w-]+)@([\d.]+):[^"]*"\)', part)) == wanted
    assert f'"python@{PYTHON}:"' in text


def test_the_easyconfig_has_the_dependencies() -> None:
    (path,) = (PACKAGING / "easybuild").glob("*.eb")
    found = dict(re.findall(r"\('([\w-]+)', '([\d.]+)'", path.read_text()))
    wanted = {EASYBUILD.get(name, name): least for name, least in BASE.items() if name not in IN_BUNDLE - {"click"}}
    assert set(wanted) <= set(found)
    numbers = {name: [int(one) for one in found[name].split(".")] for name in ("h5py", "msgspec", "python-zlib-ng")}
    assert [name for name in numbers if numbers[name] < [int(one) for one in wanted[name].split(".")]] == []


def test_all_recipes_are_of_this_version() -> None:
    conda, spack = PACKAGING / "conda-forge" / "recipe.yaml", SPACK / "packages" / "py_hpcpace" / "package.py"
    (easyconfig,), (module,) = (PACKAGING / "easybuild").glob("*.eb"), (PACKAGING / "lmod" / "hpcpace").glob("*.lua")
    assert f'version: "{__version__}"' in conda.read_text()
    assert f'version("{__version__}", ' in spack.read_text()
    assert f"-{__version__}.tar.gz" in spack.read_text()
    assert f"version = '{__version__}'" in easyconfig.read_text()
    assert easyconfig.name.startswith(f"hpcpace-{__version__}-")
    assert module.name == f"{__version__}.lua"
    for path in (PACKAGING / "docker" / "Dockerfile", PACKAGING / "apptainer" / "hpcpace.def"):
        assert re.search(rf'image\.version[ =]"?{re.escape(__version__)}"?\s', path.read_text()), path
    source = PROJECT["urls"]["Source"]
    assert [path.name for path in (conda, spack, easyconfig) if source not in path.read_text()] == []


def test_python_versions_are_those_of_the_tests() -> None:
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert versions[0] == PYTHON
    assert f"python: {versions}".replace("'", '"') in (ROOT / ".github" / "workflows" / "test.yml").read_text()


def test_the_package_imports_what_it_depends_on() -> None:
    known = (
        {name.replace("-", "_") for name in BASE} | MODULES | FRAMEWORKS | {"markupsafe"} | set(sys.stdlib_module_names)
    )
    unknown = set()
    for path in sorted((ROOT / "hpcpace").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            unknown |= {(path.name, name) for name in names if name.partition(".")[0] not in known | {"hpcpace"}}
    assert unknown == set()


def test_each_module_is_in_a_package() -> None:
    """What is in none is in no wheel, except for package data."""
    folders = {path.parent for path in (ROOT / "hpcpace").rglob("*.py")} - {ROOT / "hpcpace/observe/launch/startup"}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
