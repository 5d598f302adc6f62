"""Jobs with secrets in their command line, environment and settings: none reaches a file of the run, or the report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import h5py
import pytest

Run = Callable[..., CompletedProcess[str]]
OWN_SCRIPT = Path(__file__).with_name("own_script.py")
PROGRAM = Path(__file__).with_name("secrets_program.py")
DOCUMENTED = (Path(__file__).parents[2] / "docs" / "recorded-data.md").read_text()

ENVIRONMENT = {
    "WANDB_API_KEY": "in-environment-wandb-Zq4711x",
    "HF_TOKEN": "in-environment-hub-Zq4711x",
    "NCCL_X_TOKEN": "in-environment-nccl-Zq4711x",
    "NCCL_NET_PLUGIN": "https://me:in-environment-url-Zq4711x@host/plugin",
    "NCCL_TUNER_CONFIG_FILE": "hf_inEnvironmentShapeZq4711x",
    "GLOO_X_SECRET": "in-environment-gloo-Zq4711x",
    "HPCPACE_PRELUDE": "export OTHER=in-environment-prelude-Zq4711x",
    "HPCPACE_UPLOAD_PASSWORD": "in-environment-hpcpace-Zq4711x",
    "HPCPACE_TRACE_TRACE_DIR": "/tmp/hf_inEnvironmentSettingZq4711x",
    "SLURM_JWT": "in-environment-slurm-Zq4711x",
    "SLURM_JOB_COMMENT": "in-environment-comment-Zq4711x",
    "AWS_SECRET_ACCESS_KEY": "in-environment-aws-Zq4711x",
}
ARGUMENTS = (
    "--wandb-key=in-argument-key-Zq4711x",
    *("--db-password", "in-argument-password-Zq4711x"),
    "HUB_TOKEN=in-argument-word-Zq4711x",
    "postgres://me:in-argument-url-Zq4711x@host/db",
    '{"api_key": "in-argument-json-Zq4711x"}',
    "sk-proj-inArgumentShapeZq4711x",
    "in-environment-wandb-Zq4711x",
)
KEPT_ARGUMENTS = ("--key-padding-mask=left", "--num-tokens", "128", "--tokenizer", "gpt2")


def _shown(folder: Path) -> str:
    """Return all that the files below a folder hold, as bytes and as what HDF5 has compressed."""
    texts = []
    for path in folder.rglob("*"):
        texts.append(str(path))
        if path.is_file():
            texts.append(path.read_bytes().decode("utf-8", "replace"))
        if path.suffix == ".h5":
            with h5py.File(path, "r") as file:
                file.visititems(lambda name, entry, t=texts: t.append(f"{name} {dict(entry.attrs)}"))
                texts += [str(dict(file.attrs)), str(file["groups/name"][:])]
    return "\n".join(texts)


def _around_secrets(shown: str) -> list[str]:
    """Return what is shown around each part of a secret."""
    return re.findall(r".{0,80}Zq4711x.{0,20}", shown)


def _undocumented(attempt: Path) -> list[str]:
    """Return the fields of an attempt's JSON files that docs/recorded-data.md does not name."""
    fields = {name for path in attempt.glob("*.json") for name in json.loads(path.read_text())}
    return sorted(name for name in fields if f"`{name}`" not in DOCUMENTED)


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text('[world]\ninterface = "ghp_inSettingsShapeZq4711x"\n')
    return path


def test_no_secret_of_a_traced_script_is_recorded(python: Run, tmp_path: Path, settings: Path) -> None:
    run, environ = tmp_path / "run", {**ENVIRONMENT, "HPCPACE_TRACE_TRACE_DIR": ""}
    options = ["--run-dir", run, "--config", settings]
    done = python("-m", "hpcpace", "trace", *options, "--", OWN_SCRIPT, "4", *ARGUMENTS, *KEPT_ARGUMENTS, **environ)
    assert done.returncode == 0, done.stderr
    report = python("-m", "hpcpace", "report", run, **ENVIRONMENT)
    as_json = python("-m", "hpcpace", "report", "--json", run, **ENVIRONMENT)
    shown = _shown(run) + done.stderr + report.stdout + report.stderr + as_json.stdout
    assert _around_secrets(shown) == []
    record = json.loads((run / "attempt-0" / "run.json").read_text())
    assert record["arguments"][-5:] == list(KEPT_ARGUMENTS)
    assert record["environment"]["NCCL_X_TOKEN"] == "[redacted]"
    assert record["environment"]["NCCL_NET_PLUGIN"] == "https://[redacted]@host/plugin"
    assert len(list((run / "attempt-0" / "snapshot").iterdir())) == 1
    assert _undocumented(run / "attempt-0") == []


@pytest.mark.nightly
def test_no_secret_of_a_training_is_recorded(python: Run, tmp_path: Path) -> None:
    run, environ = tmp_path / "run", {**ENVIRONMENT, "HPCPACE_TRACE_TRACE_DIR": ""}
    options = ["--steps", "4", "--warmup-steps", "1", "--checkpoint-every", "2", "--pace", "observe"]
    done = python("-m", "hpcpace", "train", "gpt2", "--run-dir", run, *options, **environ)
    assert done.returncode == 0, done.stderr
    assert {"run.json", "result.json", "trial.json"} <= {path.name for path in (run / "attempt-0").iterdir()}
    assert _undocumented(run / "attempt-0") == []
    shown = _shown(run) + done.stdout + done.stderr
    assert _around_secrets(shown) == []


def test_no_secret_of_a_setting_is_shown_where_it_is_refused(python: Run, tmp_path: Path) -> None:
    environ = {"HPCPACE_TRACE_MAX_ROWS": "hf_inEnvironmentSettingZq4711x"}
    done = python("-m", "hpcpace", "trace", "--run-dir", tmp_path / "run", OWN_SCRIPT, "2", **environ)
    assert done.returncode == 0
    assert "trace.max_rows is '[redacted]': expected a whole number" in done.stderr
    assert _around_secrets(done.stderr) == []


def test_no_secret_of_a_wrong_command_line_is_shown(python: Run) -> None:
    done = python("-m", "hpcpace", "trace", "--wandb-key=in-argument-key-Zq4711x", OWN_SCRIPT)
    assert done.returncode == 2
    assert "No such option '--wandb-key'" in done.stderr and _around_secrets(done.stderr) == []


def test_no_secret_of_an_audit_is_recorded(python: Run, tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_Y_PASSWORD = in-file-Zq4711x\nNCCL_DEBUG = INFO\n")
    environ = {**ENVIRONMENT, "HOME": str(tmp_path), "HPCPACE_TRACE_TRACE_DIR": ""}
    done = python("-m", "hpcpace", "audit", "--save", tmp_path / "snapshots", **environ)
    shown = _shown(tmp_path / "snapshots") + done.stdout + done.stderr
    assert "NCCL_Y_PASSWORD" in shown and "NCCL_X_TOKEN" in shown
    assert _around_secrets(shown) == []


def test_no_secret_of_a_program_is_recorded_of_threads_folders_errors_and_hangs(python: Run, tmp_path: Path) -> None:
    """The script writes the metrics to a file while it runs; they are removed when it ends."""
    shaped = "hf_inProgramShapeZq4711x"
    environ = {**ENVIRONMENT, "SHAPED": shaped, "UPLOAD_PASSWORD": "in-program-password-Zq4711x"}
    environ |= {"HPCPACE_TRACE_TRACE_DIR": "", "HPCPACE_HANG_FACTOR": "2", "HPCPACE_HANG_LEAST_S": "1"}
    environ |= {"HPCPACE_METRICS_PROMETHEUS": str(tmp_path / "metrics.prom"), "HPCPACE_METRICS_INTERVAL_S": "1"}
    script = tmp_path / f"code-{shaped}" / f"{shaped}.py"
    script.parent.mkdir()
    script.write_text(PROGRAM.read_text())
    command = [script, tmp_path / "meeting", "4", *ARGUMENTS, *KEPT_ARGUMENTS]
    done = python("-m", "hpcpace", "trace", "--", *command, cwd=tmp_path, **environ)
    assert f"the token is {shaped}" in done.stderr  # the script's own traceback, which nobody may change
    ours = [line for line in done.stderr.splitlines() if line.startswith("hpcpace: ")]
    assert ours
    (run,) = (tmp_path / "runs").iterdir()
    report = python("-m", "hpcpace", "report", run, **ENVIRONMENT)
    hang = python("-m", "hpcpace", "hang", "--json", run, **ENVIRONMENT)
    dump = python("-m", "hpcpace", "dump", "--json", run / "attempt-0" / "trace" / "rank-00000.h5", **ENVIRONMENT)
    assert (run / "report.html").exists() and (run / "summary.json").exists()
    notice = json.loads(next((run / "attempt-0" / "hang").glob("rank-*.json")).read_text())
    assert "upload [redacted] as [redacted]" in {stack["name"] for stack in notice["stacks"]}
    assert hang.stdout and dump.returncode == 0
    metrics = (tmp_path / "metrics.txt").read_text()
    assert "hpcpace_run_info" in metrics
    shown = "\n".join((_shown(run), metrics, *ours, report.stdout, report.stderr, hang.stdout, dump.stdout))
    assert _around_secrets(shown) == []
