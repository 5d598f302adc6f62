#!/usr/bin/env bash
# First light on a GPU: installs what the machine lacks, without a network, and measures; at most nine minutes in all.
#
#   experiments/gpu/first_light.sh --wheels              # beforehand, with a network: fills build/first-light-wheels
#   experiments/gpu/first_light.sh [--only a,c] [--out DIR]        # on the machine with a GPU
#   experiments/gpu/first_light.sh --rehearse            # on CPUs
#   experiments/gpu/first_light.sh --write DIR ...       # puts results into docs/results/gpu.md
#
# PYTHON is the Python that has torch (default: that of .venv, else python3), WHEELS the folder of the wheels, OUT that
# of the results, NANOGPT a checkout of nanoGPT.
set -euo pipefail
cd "$(dirname "$0")/../.."
default=python3
[ ! -x .venv/bin/python ] || default=.venv/bin/python
python=${PYTHON:-$default} wheels=${WHEELS:-build/first-light-wheels} env=build/first-light-env
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# Of these, a machine takes what it lacks; torch, mpi4py, h5py and numpy must be there.
packages=(
    click iniconfig jinja2 markdown-it-py markupsafe mdurl msgspec nvidia-ml-py packaging pluggy psutil pygments pytest
    pytest-timeout rich safetensors 'setuptools<82' zlib-ng
)

fetch_wheels() {
    local platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
        --platform manylinux_2_12_x86_64 --platform manylinux1_x86_64)
    rm -rf "$wheels"
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" --dest "$wheels" "${packages[@]}"
    du --summarize --human-readable "$wheels"
}

# An environment of its own that sees the packages of the Python that has torch, and the wheels that are missing there.
make_environment() {
    "$python" -m venv --clear --without-pip "$env"
    "$python" -I - "$env" "$wheels" <<'PYTHON'
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

env, wheels = Path(sys.argv[1]), Path(sys.argv[2])
ours = next(env.glob("lib/python*/site-packages"))
standard = [*map(sysconfig.get_path, ("stdlib", "platstdlib")), f"{sysconfig.get_path('stdlib')}/lib-dynload"]
others = [path for path in sys.path if path and path not in standard and not path.endswith(".zip")]
(ours / "others.pth").write_text("\n".join(others) + "\n")


def lacks(wheel: Path) -> bool:
    name = wheel.name.split("-")[0]
    try:
        found = version(name)
    except PackageNotFoundError:
        return True
    return name == "setuptools" and int(found.split(".")[0]) < 77  # of pyproject.toml


missing = [str(wheel) for wheel in sorted(wheels.glob("*.whl")) if lacks(wheel)]
print("missing here:", " ".join(Path(wheel).name.split("-")[0] for wheel in missing) or "nothing", flush=True)
if missing:
    pip = [sys.executable, "-m", "pip", "--python", f"{env}/bin/python", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, *missing], check=True)
PYTHON
}

# Without isolation the build finds torch, and makes the compiled layer where there is a compiler. The checkout is what
# runs, for the tests are in it: it gets what was built.
install_hpcpace() {
    "$python" -m pip --python "$env/bin/python" install --quiet --no-index --no-deps --no-build-isolation .
    local installed
    installed=$(cd "$env" && env -u PYTHONPATH bin/python -c 'import hpcpace; print(hpcpace.__path__[0])')
    cp "$installed"/metrics/_kernels*.so hpcpace/metrics/ || echo "no compiled kernels"
    cp "$installed"/observe/collectives/_layer_*.so hpcpace/observe/collectives/ || echo "no compiled layer"
}

case ${1:-} in
--wheels) fetch_wheels && exit ;;
--write | --help | -h) exec "$python" -m experiments.gpu "$@" ;;
esac
read -r total limit < <("$python" -c 'import sys; from experiments.gpu.runner import limits; print(*limits(sys.argv[1:]))' "$@")
export -f make_environment install_hpcpace
export python wheels env
if timeout --kill-after 5 "$limit" bash -euo pipefail -c make_environment; then
    timeout --kill-after 5 $((limit - SECONDS)) bash -euo pipefail -c install_hpcpace ||
        echo "hpcpace was not installed within $limit s: the checkout runs without it"
    python=$env/bin/python
fi
exec "$python" -m experiments.gpu --out "${OUT:-build/first-light/results}" --budget $((total - SECONDS)) "$@"
