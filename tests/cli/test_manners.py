"""What the command line says to mistakes: of variables, commands and options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcpace import __version__
from hpcpace.core.settings import unknown_variables


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("HPCPACE_TRACE_FLUSH", "HPCPACE_TRACE_FLUSH_INTERVAL_S"),
        ("HPCPACE_DIAGNOSIS_JITTER_SHAR", "HPCPACE_DIAGNOSIS_JITTER_SHARE"),
        ("HPCPACE_RUNDIR", "HPCPACE_RUN_DIR"),
        ("HPCPACE_OPTOUT", "HPCPACE_OPT_OUT"),
        ("HPCPACE_TRACE_QQQ", ""),
    ],
)
def test_a_mistyped_variable_is_refused_with_the_nearest_name(hpcpace, monkeypatch, name, nearest):
    monkeypatch.setenv(name, "3")
    code, _, err = hpcpace("config")
    assert code == 2
    assert f"unknown environment variable: {name}" in err
    assert f"(did you mean {nearest}?)" in err if nearest else "did you mean" not in err


def test_a_variable_that_is_like_none_of_ours_is_a_warning(hpcpace, monkeypatch):
    monkeypatch.setenv("HPCPACE_UPLOAD_URL", "3")
    code, _, err = hpcpace("config")
    assert code == 0
    assert err == "hpcpace: warning: unknown environment variable: HPCPACE_UPLOAD_URL; ignored\n"


def test_every_variable_that_the_package_and_its_scripts_read_is_known():
    root = Path(__file__).parents[2]
    files = [*root.glob("hpcpace/**/*.py"), *root.glob("sbatch/*.sh"), *root.glob("docs/*.md")]
    variable = re.compile(r"(?<![A-Z_])HPCPACE_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_*.])")
    names = {name for path in files for name in variable.findall(path.read_text())}
    found = {one.name for one in unknown_variables(dict.fromkeys(names, ""))}
    # Examples of documents, of a mistake and of a form.
    assert found <= {"HPCPACE_TRACE_FLUSH", "HPCPACE_SECTION_KEY", "HPCPACE_COMPLETE"}


def test_the_names_of_environment_modules_are_nobody_s_mistake():
    assert unknown_variables({"HPCPACE_ROOT": "/sw", "HPCPACE_VERSION": "1", "HPCPACE": ""}) == []


def test_a_prolog_goes_on_with_a_mistyped_variable(hpcpace, monkeypatch):
    monkeypatch.setenv("HPCPACE_TRACE_FLUSH", "3")
    code, _, err = hpcpace("audit", "--prolog")
    assert (code, "HPCPACE_TRACE_FLUSH" in err) == (0, False)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["reprot"], "'report'"),
        (["lsit"], "'list'"),
        (["train", "gtp2"], "'gpt2'"),
        (["audit", "dif"], "'diff'"),
        (["report", "x", "--stepz", "1:2"], "--steps"),
    ],
)
def test_a_mistyped_word_is_refused_with_the_nearest_one(hpcpace, words, meant):
    code, _, err = hpcpace(*words)
    assert code == 2
    assert "Did you mean" in err and meant in err


def test_the_version_has_a_short_option(hpcpace):
    assert hpcpace("-V") == (0, f"hpcpace, version {__version__}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_prints_the_completion_of_a_shell(hpcpace, shell):
    code, out, _ = hpcpace("completion", shell)
    assert code == 0
    assert f"_HPCPACE_COMPLETE={shell}_complete" in out


def test_bash_completes_a_command_after_the_script(tmp_path):
    program = tmp_path / "hpcpace"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hpcpace "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(hpcpace completion bash)"; COMP_WORDS=(hpcpace repo); COMP_CWORD=1; _hpcpace_completion hpcpace;'
        ' echo "${COMPREPLY[@]}"'
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["report"]
