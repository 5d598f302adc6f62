"""Help texts on a terminal of 80 columns, their examples, and the guide that `hpcpace help` shows."""

from __future__ import annotations

from collections.abc import Iterator

import click
from calls import call_in, mistake_in
from cases import each_case
from click.testing import CliRunner

from hpcpace.cli import COMMANDS, HEADINGS, cli
from hpcpace.cli.commands import examples
from hpcpace.cli.config import topics
from hpcpace.core.errors import UsageError

_INDENT, _WIDTH = 2, 80


def _groups(found: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(found, click.Group):
        yield path
        yield from (inner for way, child in _children(found, path) for inner in _groups(child, way))


def _children(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        child = group.get_command(context, name)
        assert child is not None
        yield (*path, name), child


def _commands(found: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(found, click.Group):
        yield from (inner for way, child in _children(found, path) for inner in _commands(child, way))


@each_case("path", list(_groups(cli)), ids=" ".join)
def test_the_list_of_commands_shows_whole_sentences(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(cli, [*path, "--help"], terminal_width=80).output
    assert "..." not in shown.partition("Commands:")[2].partition("Examples:")[0]


def test_without_arguments_the_help_is_shown_once() -> None:
    for words in ([], ["lab"]):
        plain = CliRunner().invoke(cli, words)
        assert (plain.exit_code, plain.stdout) == (2, "")
        assert plain.stderr == CliRunner().invoke(cli, [*words, "--help"]).stdout


def test_every_command_is_listed_below_its_heading() -> None:
    shown = CliRunner().invoke(cli, ["--help"]).output
    assert all(f"  {name} " in shown for name in COMMANDS)
    places = [shown.index(f"\n{heading}:\n") for heading in HEADINGS]
    assert places == sorted(places) and "\nCommands:\n" not in shown


def test_every_command_has_two_examples_and_they_parse() -> None:
    paths = [" ".join(path) for path in _commands(cli)]
    assert sorted(examples()) == sorted(paths)
    wrong = {}
    for path, lines in examples().items():
        assert len(set(lines)) == 2
        for example in lines:
            call = call_in(example) or ""
            is_other = not call.startswith(path) or len(example) + _INDENT > _WIDTH
            if mistake := "is too long, or of another command" if is_other else mistake_in(call):
                wrong[example] = mistake
    assert wrong == {}


def test_help_ends_with_the_examples() -> None:
    shown = CliRunner().invoke(cli, ["lab", "fault", "mtu", "--help"], terminal_width=80).output
    assert shown.endswith("\nExamples:\n" + "".join(f"  {line}\n" for line in examples()["lab fault mtu"]))


def test_no_help_text_points_to_a_file_that_a_wheel_lacks() -> None:
    wrong = [path for path in _commands(cli) if "docs/" in CliRunner().invoke(cli, [*path, "--help"]).output]
    assert wrong == []


def _said(*words: str) -> str:
    result = CliRunner().invoke(cli, ["help", *words], env={"COLUMNS": "80"})
    if isinstance(result.exception, UsageError):
        return str(result.exception)
    assert result.exit_code == 0
    return result.output


def test_help_finds_pages_sections_and_terms_by_name() -> None:
    assert "Running under Slurm" in _said()
    assert "Attaching to your own training" in _said("attach")
    assert _said("docs/attach.md") == _said("ATTACH")
    assert "--inject takes" in _said("faults")
    assert "GPU far from every adapter" in _said("N01")
    assert "notable_wait_share" in _said("thresholds.cores")
    assert "hpcpace_hanging" in _said("monitoring")
    assert "stages wait for each other" in _said("bubble")
    assert _said("straggler") == _said("persistent", "straggler")
    assert "<!--" not in _said("glossary")


def test_help_names_topics_like_one_that_it_does_not_have() -> None:
    assert _said("pacin").startswith("no topic 'pacin' in the guide: try pacing")
    assert _said("pandas").startswith("no topic 'pandas' in the guide: try python")
    assert _said("qqqq") == "no topic 'qqqq' in the guide: `hpcpace help` lists the pages"


def test_help_does_not_take_the_comments_of_a_shell_for_headings() -> None:
    guide = {"page": "# Page\n\n## First\n```\n# comment\n```\nafter\n\n## Second\n"}
    assert topics(guide)["first"] == ["## First\n```\n# comment\n```\nafter\n\n"]
    assert "comment" not in topics(guide)
