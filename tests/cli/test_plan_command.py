"""`hpcpace plan`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from experiments.synthetic_run import SyntheticRun

MODEL = ("--model", "gpt2-xl", "--machine", "a100")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SyntheticRun().write(tmp_path_factory.mktemp("traced") / "run").path


def test_names_the_best_layout_first(hpcpace) -> None:
    code, out, err = hpcpace("plan", *MODEL, "--nodes", "1,2,8", "--price", "2.5", "--top", "3")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[1] == "hpcpace plan gpt2-xl on a100"
    assert (
        lines[2].startswith("Verdict    fastest: dp=64") and " on 8 nodes: " in lines[2] and " tokens/s [" in lines[2]
    )
    assert all(f"\n{heading}  " in out for heading in ("Nodes", "Layouts on 8 nodes", "What would help"))
    assert "cost per" in out and "do not fit into memory" in out
    assert max(map(len, lines)) <= 100


def test_json_has_all_layouts_in_units(hpcpace) -> None:
    code, out, _ = hpcpace("plan", *MODEL, "--nodes", "2", "--price", "2", "--json")
    found = json.loads(out)
    assert code == 0 and found["unit"] == "tokens" and found["num_layouts"] > len(found["layouts"]) == 8
    first = found["layouts"][0]
    assert first["step_low_s"] < first["step_s"] < first["step_high_s"]
    assert first["ranks"] == first["dp"] * first["pp"] * first["tp"] == 16
    assert first["samples_per_s"] == pytest.approx(512 * 1024 / first["step_s"])
    assert first["cost_per_billion"] == pytest.approx(2 * first["gpu_hours_per_billion"])
    assert [one["step_s"] for one in found["layouts"]] == sorted(one["step_s"] for one in found["layouts"])
    assert first["is_on_front"] and sum(first["shares"].values()) == pytest.approx(1)


def test_a_plan_for_cpus_counts_hours_of_ranks(hpcpace) -> None:
    for machine, hours in (("cpu", "rank hours"), ("a100", "GPU hours")):
        _, out, _ = hpcpace("plan", "--model", "gpt2-small", "--machine", machine, "--nodes", "2", "--batch", "64")
        assert hours in out, machine


def test_data_sheets_give_no_interval(hpcpace) -> None:
    code, out, _ = hpcpace("plan", "--model", "gpt2-small", "--machine", "h100", "--nodes", "1", "--batch", "64")
    assert code == 0 and "tokens/s, error unknown" in out and "nobody has measured it" in out


def test_a_slower_network_is_no_faster(hpcpace) -> None:
    steps = []
    for rate in ("800gbit", "10gbit", "1gbit"):
        _, out, _ = hpcpace("plan", *MODEL, "--nodes", "4", "--network", rate, "--json")
        steps.append(json.loads(out)["layouts"][0]["step_s"])
    assert steps == sorted(steps) and steps[-1] > 1.5 * steps[0]


def test_links_that_nobody_measured_have_no_interval(hpcpace) -> None:
    steps = {}
    for links in ((), ("--nics", "4"), ("--oversubscription", "4"), ("--oversubscription", "4", "--leaf-nodes", "8")):
        _, out, _ = hpcpace("plan", *MODEL, "--nodes", "16", "--network", "10gbit", *links, "--json")
        found = json.loads(out)
        steps[links[-1:]] = found["layouts"][0]["step_s"]
        assert (found["layouts"][0]["step_low_s"] is None) == bool(links)
        assert any("rests on no measurement" in remark for remark in found["remarks"]) == bool(links)
    assert steps["4",] > steps["8",] >= steps[()]
    _, out, _ = hpcpace("plan", *MODEL, "--nodes", "16", "--network", "10gbit", "--nics", "4", "--json")
    assert json.loads(out)["layouts"][0]["step_s"] < steps[()]


def test_changes_that_are_asked_for_are_listed_even_if_they_do_not_help(hpcpace) -> None:
    code, out, _ = hpcpace("plan", *MODEL, "--nodes", "2", "--what", "network,layout,checkpointing")
    section = out[out.index("What would help") :].splitlines()[1:4]
    assert code == 0 and [line.split(":")[0] for line in section] == [
        "- 10 times the network",
        "- all activations recomputed in the backward pass",
        "- layout not tried",
    ]


def test_restrictions_and_memory_hold(hpcpace) -> None:
    only = ("--only", "pp=8,4", "--only", "zero=0", "--gpu-memory", "12")
    _, out, _ = hpcpace("plan", *MODEL, "--nodes", "1", *only, "--json")
    layouts = json.loads(out)["layouts"]
    assert layouts and all(one["pp"] in (4, 8) and one["zero"] == 0 and one["memory_bytes"] < 12e9 for one in layouts)


def test_a_traced_run_predicts_itself(hpcpace, traced: Path) -> None:
    code, out, err = hpcpace("plan", traced, "--only", "zero=0", "--json")
    found = json.loads(out)
    assert (code, err, found["unit"]) == (0, "", "samples")
    assert [one["nodes"] for one in found["layouts"]] == [1]
    assert found["layouts"][0]["step_s"] == pytest.approx(0.036, rel=0.02)


def test_a_run_on_another_machine_has_an_interval_for_its_own_type_alone(hpcpace, tmp_path: Path) -> None:
    run = SyntheticRun().write(tmp_path / "run")
    model = {"name": "gpt2", "preset": "tiny", "num_layers": 4, "width": 128, "num_heads": 4, "seq_len": 16}
    run.attempts()[-1].run_json.write_text(json.dumps({"model": {**model, "vocabulary": 256, "dtype": "float32"}}))
    call = ("plan", run.path, "--machine", "a100", "--nodes", "1", "--batch", "64")
    assert (
        "error unknown" in hpcpace(*call)[1] and "steps of its constants had elements of 2 bytes" in hpcpace(*call)[1]
    )
    assert "error unknown" not in hpcpace(*call, "--dtype", "bfloat16")[1]


def test_says_what_the_run_has_now(hpcpace, traced: Path) -> None:
    _, out, _ = hpcpace("plan", traced)
    assert "\nNow        dp=4, microbatch 16: 1.78k samples/s as measured, by the median step\n" in out


def test_another_type_was_not_measured(hpcpace, traced: Path) -> None:
    code, out, _ = hpcpace("plan", traced, "--dtype", "bfloat16")
    assert (
        code == 0 and "samples/s, error unknown" in out and "the run had elements of 4 bytes" in " ".join(out.split())
    )


def test_a_traced_run_on_more_nodes_needs_a_network(hpcpace, traced: Path) -> None:
    code, out, err = hpcpace("plan", traced, "--nodes", "1,2")
    assert (code, out) == (3, "") and "name the network with --network or --probe" in err
    code, out, _ = hpcpace("plan", traced, "--nodes", "1,2", "--network", "10gbit", "--json")
    assert code == 0 and {one["nodes"] for one in json.loads(out)["layouts"]} == {1, 2}
    code, _, err = hpcpace("plan", traced, "--nodes", "1,17", "--network", "10gbit")
    assert code == 3 and "17 nodes are more than 16 times the 1 of the run" in err


def test_a_script_is_not_moved_to_another_machine(hpcpace, traced: Path) -> None:
    code, _, err = hpcpace("plan", traced, "--machine", "a100")
    assert code == 2 and "on its own machine alone: name --model, too" in err


def test_the_job_script_runs_the_best_layout(hpcpace, tmp_path: Path) -> None:
    only = ("--only", "micro_batch=16", "--batch", "256", "--only", "zero=1")
    code, out, _ = hpcpace("plan", *MODEL, "--nodes", "2", *only, "--write", tmp_path / "job.sh")
    script = (tmp_path / "job.sh").read_text()
    assert code == 0 and out.endswith("job.sh\n")
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n" in script
    assert (
        "srun hpcpace train gpt2 --preset xl --mesh dp=16,pp=1,tp=1 --batch-size 256 --zero 1 --dtype bfloat16"
        in script
    )
    assert subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=False).returncode == 0


def test_a_name_of_a_file_is_no_command(hpcpace, tmp_path: Path) -> None:
    model = tmp_path / "gpt2-$(touch owned).toml"
    model.write_text("num_layers = 4\nhidden = 64\nnum_heads = 4\nsequence = 32\nvocabulary = 100\n")
    code, *_ = hpcpace("plan", "--model", model, "--machine", "a100", "--nodes", "1", "--write", tmp_path / "job.sh")
    assert code == 0 and "touch" not in (tmp_path / "job.sh").read_text()


def test_numbers_of_nodes_that_nothing_fits_are_left_out(hpcpace) -> None:
    code, out, _ = hpcpace("plan", *MODEL, "--nodes", "1,6", "--batch", "64", "--only", "pp=1", "--only", "tp=1")
    assert code == 0 and "6 nodes left out: no layout of 48 ranks fits" in " ".join(out.split())


def test_sizes_beyond_the_measured_ones_have_no_interval(hpcpace) -> None:
    _, out, _ = hpcpace("plan", *MODEL, "--nodes", "512,1024", "--batch", "8192", "--json")
    known = {one["nodes"]: one["step_low_s"] is not None for one in json.loads(out)["layouts"]}
    assert known == {512: True, 1024: False}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "name a run, or both --model and --machine"),
        (("--model", "gpt2-xl"), 2, "name a run, or both"),
        (("--model", "gpt9", "--machine", "a100"), 2, "no model 'gpt9': name a file, or one of"),
        ((*MODEL, "--nodes", "0"), 2, "every number must be from 1 to"),
        ((*MODEL, "--nodes", "1,x"), 2, "'1,x': give whole numbers separated by commas"),
        ((*MODEL, "--only", "ep=2"), 2, "write a column and its values, like tp=1,2"),
        ((*MODEL, "--only", "tp"), 2, "write a column and its values"),
        ((*MODEL, "--only", "tp=3"), 2, "no layout of 8 ranks fits gpt2-xl"),
        ((*MODEL, "--only", "tp=0"), 2, "name tp once, with values from 1"),
        ((*MODEL, "--only", "zero=9"), 2, "name zero once, with values from 0 to 3"),
        ((*MODEL, "--only", "tp=1", "--only", "tp=2"), 2, "name tp once"),
        ((*MODEL, "--batch", "1", "--nodes", "3"), 2, "no layout of 24 ranks"),
        ((*MODEL, "--network", "fast"), 2, "--network"),
        ((*MODEL, "--what", "nodes,gpus"), 2, "'gpus': choose from nodes, layout, precision"),
        ((*MODEL, "--leaf-nodes", "4"), 2, "say by how much with --oversubscription"),
        ((*MODEL, "--oversubscription", "0.5"), 2, "--oversubscription"),
        ((*MODEL, "--nics", "0"), 2, "--nics"),
        ((*MODEL, "--gpu-memory", "0.5", "--nodes", "1"), 3, "no layout fits into memory: the smallest needs"),
        ((*MODEL, "--write", "x", "--html", "x"), 2, "--write and --html both name x: give each a file"),
        ((*MODEL, "--probe", "none.json"), 2, "cannot read the probe none.json"),
        (("no-such-run",), 2, "no run directory at no-such-run"),
    ],
)
def test_wrong_calls_say_what_to_do(hpcpace, words: tuple[str, ...], code: int, message: str) -> None:
    found, out, err = hpcpace("plan", *words)
    assert (found, out) == (code, "") and message in err, err
