from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.errors import DataError
from hpcpace.train.data import BytePairEncoder, byte_characters, load_encoder, word_pattern


def _encoder(*merges: tuple[str, str]) -> BytePairEncoder:
    tokens = [*byte_characters(), *("".join(pair) for pair in merges)]
    return BytePairEncoder({token: number for number, token in enumerate(tokens)}, merges)


def _tokens(encoder: BytePairEncoder, text: str) -> list[str]:
    """Return the tokens as the vocabulary writes them."""
    names = {number: name for name, number in encoder._numbers.items()}
    return [names[number] for number in encoder.encode(text).tolist()]


@each_case(
    ("byte", "character"),
    # As in GPT-2's own files: a space is written as G with a dot above, a new line as C with one.
    [(ord("a"), "a"), (ord("!"), "!"), (ord(" "), "Ġ"), (ord("\n"), "Ċ"), (0, "Ā"), (0x7F, "ġ"), (0xAD, "Ń")],
)
def test_bytes_are_written_as_in_gpt2s_files(byte: int, character: str) -> None:
    assert byte_characters()[byte] == character


def test_each_byte_has_a_character_of_its_own() -> None:
    assert len(set(byte_characters())) == 256


@each_case(
    ("text", "words"),
    [
        ("Hello world", ["Hello", " world"]),
        ("don't we'll I'm", ["don", "'t", " we", "'ll", " I", "'m"]),
        ("in 2019, x2", ["in", " 2019", ",", " x", "2"]),
        ("a  b", ["a", " ", " b"]),
        ("end.\n\n\nNext", ["end", ".", "\n\n", "\n", "Next"]),
        ("  ", ["  "]),
        ("naïve Ωmega 名前", ["naïve", " Ωmega", " 名前"]),
        ("½ Ⅷ ٣", ["½", " Ⅷ", " ٣"]),  # numbers that are no decimal digits, too
        ("a_b", ["a", "_", "b"]),
        ("= Title = \n", ["=", " Title", " =", " \n"]),
    ],
)
def test_words_are_cut_as_gpt2_cuts_them(text: str, words: list[str]) -> None:
    assert word_pattern().findall(text) == words


def test_no_character_is_lost_between_words() -> None:
    text = "".join(map(chr, [*range(0x250), *range(0x2000, 0x2070), 0x3000, 0x1F600]))
    assert "".join(word_pattern().findall(text)) == text


def test_pairs_are_joined_in_order_of_precedence() -> None:
    # The example of Sennrich et al. 2016, figure 1: r·, l o, lo w, e r·; here the end of a word has no mark.
    encoder = _encoder(("l", "o"), ("lo", "w"), ("e", "r"))
    assert _tokens(encoder, "lower") == ["low", "er"]
    assert _tokens(encoder, "lowest") == ["low", "e", "s", "t"]


def test_a_pair_that_stands_earlier_wins_over_one_further_left() -> None:
    assert _tokens(_encoder(("b", "c"), ("a", "b")), "abc") == ["a", "bc"]


def test_a_pair_is_joined_wherever_it_occurs_from_the_left() -> None:
    assert _tokens(_encoder(("a", "a")), "aaaaa") == ["aa", "aa", "a"]
    assert _tokens(_encoder(("a", "a"), ("aa", "aa")), "aaaa") == ["aaaa"]


def test_pairs_are_not_joined_across_words() -> None:
    assert _tokens(_encoder(("o", "Ġ"), ("Ġ", "w"), ("o", "w")), "so wow") == ["s", "o", "Ġw", "ow"]


def test_characters_beyond_ascii_are_their_bytes() -> None:
    assert _tokens(_encoder(), "é") == ["Ã", "©"]
    assert _tokens(_encoder(("Ã", "©")), "é") == ["Ã©"]


def _files(folder: Path, vocabulary: object, merges: str) -> Path:
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text(merges)
    return folder


BYTES = {character: number for number, character in enumerate(byte_characters())}


def test_reads_the_two_files_of_gpt2(tmp_path: Path) -> None:
    encoder = load_encoder(_files(tmp_path, BYTES | {"Ġt": 256, "Ġth": 300}, "#version: 0.2\nĠ t\nĠt h\n"))
    assert encoder.encode("a the").tolist() == [BYTES["a"], 300, BYTES["e"]]
    assert encoder.num_tokens == 301


@each_case(
    ("vocabulary", "merges", "seen"),
    [
        ([], "", r"vocab\.json \(it is \[\]: expected an object\)"),
        ({"a": "b"}, "", r"vocab\.json \(\.a is 'b': expected an integer\)"),
        ({"a": 1}, "", "lacks 255 of the 256 byte tokens"),
        (BYTES, "a b\n", "join no two tokens"),
        (BYTES, "abc\n", "join no two tokens"),
    ],
)
def test_refuses_files_that_are_no_vocabulary(tmp_path: Path, vocabulary: object, merges: str, seen: str) -> None:
    with pytest.raises(DataError, match=seen):
        load_encoder(_files(tmp_path, vocabulary, merges))


def test_refuses_a_folder_without_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file at .*vocab\.json: name the folder"):
        load_encoder(tmp_path)
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(DataError, match=r"cannot read .*vocab\.json"):
        load_encoder(tmp_path)
