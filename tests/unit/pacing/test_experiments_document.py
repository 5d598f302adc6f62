"""The document of the experiments: sections are replaced one by one, and keep their order."""

from __future__ import annotations

from experiments.pacing.experiment import Claim, Experiment, Finding, section_of, sections_in, write_section

EXPERIMENTS = tuple(
    Experiment(name=name, title=f"About {name}", run=lambda effort, tell: Finding(table=[["a"]], claims=[]))
    for name in ("first", "second")
)


def _finding(value):
    claims = [Claim(text="a gain", holds=True), Claim(text="a loss", holds=False), Claim(text="else", holds=None)]
    return Finding(table=[["policy", "gain"], ["slack", value]], claims=claims, notes=["as it is"])


def test_a_section_has_its_table_and_says_what_does_not_hold():
    section = section_of(EXPERIMENTS[0], _finding("+3 %"), duration_s=5.0)
    assert section.startswith("## About first\n")
    assert "python -m experiments.pacing first --write" in section
    assert "| policy | gain |\n|---|---|\n| slack | +3 % |" in section
    assert "- holds: a gain\n- DOES NOT HOLD: a loss\n- cannot tell: else" in section


def test_a_section_written_again_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "doc.md"
    for name, value in (("second", "+1 %"), ("first", "+2 %"), ("second", "+7 %")):
        experiment = next(one for one in EXPERIMENTS if one.name == name)
        write_section(path, EXPERIMENTS, name, section_of(experiment, _finding(value), duration_s=5.0))
    text = path.read_text()
    assert text.startswith("# ")
    assert text.index("## About first") < text.index("## About second")
    assert ("+1 %" in text, "+2 %" in text, "+7 %" in text) == (False, True, True)
    assert set(sections_in(text, EXPERIMENTS)) == {"first", "second"}
