"""Many problems in a few lines that still say what is wrong, how often, and where."""

from __future__ import annotations

import time

from cases import each_case

from hpcpace.core.text import MAX_LETTERS, MAX_MESSAGE_LETTERS, folded, folded_message, rank_list, shortened

TRACE = "/runs/a/attempt-0/trace/rank-{:05d}.h5"
WORDS = [f"{chr(97 + one % 26)}{chr(97 + one // 26)}" for one in range(600)]


def test_few_problems_stay_as_they_are():
    problems = [f"{TRACE.format(rank)}: table steps is missing" for rank in range(3)]
    assert folded(problems, rest="--verbose") == problems


def test_one_fault_of_many_ranks_is_one_line_with_their_numbers():
    problems = [f"{TRACE.format(rank)}: table steps is missing" for rank in (0, 1, 2, 3, 7)]
    assert folded(problems, rest="--verbose") == [
        "5 ranks (0-3, 7): /runs/a/attempt-0/trace/rank-*.h5: table steps is missing"
    ]


def test_one_fault_of_all_tables_of_all_ranks_is_one_line():
    problems = [
        f"{TRACE.format(rank)}: table {table} is damaged and left out (column {column}: it has filters [32015])"
        for rank in range(16)
        for table, column in (("steps", "begin_ns"), ("phases", "kind"), ("clock", "rank"), ("groups", "id"))
    ]
    assert folded(problems, rest="--verbose") == [
        "64 times (ranks 0-15, tables steps, phases, clock and 1 more): /runs/a/attempt-0/trace/rank-*.h5: table * is "
        "damaged and left out (column *: it has filters [32015])",
        "all 64: --verbose",
    ]


def test_of_faults_that_differ_in_figures_the_first_three_are_shown():
    problems = [f"{TRACE.format(rank)}: {rank + 5} rows are lost" for rank in range(1000)]
    assert folded(problems, rest="--verbose or summary.json") == [
        *problems[:3],
        "and 997 more (ranks 3-999); all 1000: --verbose or summary.json",
    ]


def test_faults_that_differ_in_what_files_say_are_one_line_beside_others():
    problems = [f"{TRACE.format(rank)}: version is '{word}', not '1.5'" for rank, word in enumerate(WORDS)]
    assert folded(["600 of 600 ranks have no trace", *problems]) == [
        "600 of 600 ranks have no trace",
        f"600 ranks (0-599), figures of the first: {TRACE.replace('{:05d}', '*')}: version is 'aa', not '1.5'",
    ]


def test_of_a_ranked_list_the_first_three_are_shown_whatever_their_kinds():
    problems = [f"rank {rank}: lost {rank} operations{' and more' * (rank % 2)}" for rank in range(99, 0, -1)]
    lines = folded(problems, rest="--verbose", is_ranked=True)
    assert lines == [*problems[:3], "and 96 more (ranks 1-96); all 99: --verbose"]


def test_one_fault_of_many_files_names_the_first_three():
    problems = [f"/profiles/{word}.json: not JSON" for word in WORDS]
    assert folded(problems, rest="--verbose") == [
        "600 times (aa.json, ba.json, ca.json and 597 more): /profiles/*: not JSON",
        "all 600: --verbose",
    ]


def test_of_many_different_faults_the_first_three_are_shown():
    problems = [f"{TRACE.format(rank)}: {word}" for rank, word in enumerate(WORDS)]
    assert folded(problems, rest="--verbose") == [*problems[:3], "and 597 more (ranks 3-599); all 600: --verbose"]


def test_a_single_fault_among_many_equal_ones_keeps_its_line():
    many = [f"{TRACE.format(rank)}: table steps is missing" for rank in range(99)]
    odd = f"{TRACE.format(99)}: table clock is damaged and left out (it is no dataset)"
    assert folded([*many, odd]) == ["99 ranks (0-98): /runs/a/attempt-0/trace/rank-*.h5: table steps is missing", odd]


def test_verbose_shows_every_problem_in_full():
    problems = [f"{TRACE.format(rank)}: {'x' * 1000}" for rank in range(100)]
    assert folded(problems, rest="--verbose", is_verbose=True) == problems


def test_an_error_folds_the_reasons_that_it_lists():
    reasons = "".join(f"\n- {TRACE.format(rank)} is empty" for rank in range(16))
    text = f"no trace can be read in /runs/a{reasons}"
    expected = "no trace can be read in /runs/a\n- 16 ranks (0-15): /runs/a/attempt-0/trace/rank-*.h5 is empty"
    assert folded_message(text) == expected
    assert folded_message(text, is_verbose=True) == text


def test_a_problem_that_lists_reasons_itself_is_one_line():
    reasons = "".join(f"\n- {TRACE.format(rank)} is empty" for rank in range(16))
    (line,) = folded([f"no trace can be read in /runs/a{reasons}"])
    assert line.startswith("no trace can be read in /runs/a; 16 ranks (0-15): ")


def test_what_steers_a_terminal_is_escaped():
    assert folded(["\x1b[2J", "a\rb"]) == [r"\x1b[2J", r"a\rb"]
    assert folded_message("a\x1b\n- b\x1b", is_verbose=True) == "a\\x1b\n- b\\x1b"


@each_case(
    "text",
    [
        f"/{'p' * 4095}/rank-00000.h5: it is damaged",
        f"{TRACE.format(0)}: {'reason ' * 300}ends here",
        f"{'n' * 10_000} {'m' * 10_000} is unknown",
        "x" * 1_000_000,
    ],
)
def test_a_line_keeps_both_ends_of_what_is_too_long(text: str):
    (line,) = folded([text])
    assert len(line) <= MAX_LETTERS and "..." in line
    assert line[:20] == text[:20] and line[-12:] == text[-12:]
    assert len(folded_message(text)) <= MAX_MESSAGE_LETTERS


def test_a_long_path_leaves_the_sentence_around_it_whole():
    text = f"cannot read /{'folder/' * 100}rank-00000.h5: permission denied; name a folder of runs that you may read"
    line = shortened(text, max_letters=MAX_LETTERS)
    assert line.startswith("cannot read /folder/")
    assert line.endswith("rank-00000.h5: permission denied; name a folder of runs that you may read")


def test_a_list_of_scattered_ranks_is_bounded():
    assert rank_list(range(0, 2000, 2)).endswith("28, 30, ... and 984 more")


@each_case(
    "problem",
    [
        "1 " * 500_000,
        "a." * 500_000,
        "a/1" * 300_000,
        "\n- a1" * 40_000,
        " ".join(["w" * 61] * 16_000),
        "." * 1_000_000,
    ],
    ids=["numbers", "dots", "path", "reasons", "words", "one-word"],
)
def test_time_grows_with_the_length_and_not_with_its_square(problem: str):
    begin_s = time.process_time()
    folded([problem] * 4)
    folded_message(problem)
    assert time.process_time() - begin_s < 10.0
