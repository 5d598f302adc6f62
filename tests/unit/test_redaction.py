"""Secrets are taken out of texts wherever they occur, and useful facts stay."""

from __future__ import annotations

import json
import random
import re
import shlex
import string
import time
from pathlib import Path

import pytest
from cases import chosen, each_case

from hpcpace.core.redaction import MARK, Redaction, is_secret

SECRET = "correct-horse-7"
HUGGING_FACE = "hf_" + "aB3dE6gH9jK2" * 3
GITHUB = "ghp_" + "aB3dE6gH9jK2" * 3
OPENAI = "sk-proj-" + "aB3dE6gH9jK2" * 3
AWS = "AKIA" + "ABCDEFGH23456789"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N"

SECRET_NAMES = [
    *("--wandb-key", "WANDB_API_KEY", "api_key", "apiKey", "apikey", "X-Api-Key", "OPENAI_API_KEY_2", "--key"),
    *("--hf-token", "HF_TOKEN", "token", "githubToken", "--use_auth_token", "NCCL_X_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "client_secret", "SECRET_THING", "secrets"),
    *("--password", "DB_PASSWORD", "dbPassword", "passwd", "MYSQL_PWD", "DB_PASS", "--passphrase", "--pass"),
    *("--credentials", "GOOGLE_APPLICATION_CREDENTIALS", "creds", "--auth", "HTTP_AUTH", "SLURM_JWT", "AZURE_PAT"),
    *("logger.wandb.key", "NEPTUNE_API_TOKEN", "private-key", "ssh_private_key", "Authorization", "session_cookie"),
]

HARMLESS_NAMES = [
    *("--key-padding-mask", "--num-key-value-heads", "--sort-key", "--primary_key", "--image-key", "cache_key", "seed"),
    *("--num-tokens", "--max-tokens", "--tokens-per-batch", "--tokenizer", "TOKENIZERS_PARALLELISM", "--pad-token"),
    *("--eos-token-id", "mask_token", "--special-tokens", "--token-dropout", "token_type", "num_tokens"),
    *("NCCL_IB_PKEY", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "host_key", "public_key", "--keys", "--keyword", "monkey"),
    *("--password-file", "--api-key-path", "--token-file", "--secret-name-length", "--api-url", "--api-version"),
    *("PWD", "OLDPWD", "--passes", "--forward-pass", "compass", "--author", "--no-auth", "auth_type", "--bypass"),
    *("SLURM_JOB_ID", "OMP_NUM_THREADS", "HPCPACE_TRAIN_COMPRESS", "SSH_AUTH_SOCK", "XAUTHORITY", "learning_rate"),
]


DATA = Path(__file__).parents[1] / "data" / "redaction"
PASSWORDS = (SECRET, "Tr0ub4dor&3", "hunter2x9Zq", "Ab4711-xyz_Q")
LETTERS = {
    "a": string.ascii_letters + string.digits,
    "h": "0123456789abcdef",
    "u": string.ascii_uppercase + string.digits,
    "d": string.digits,
}
NUM_DRAWS = 4


def _lines(name: str) -> list[str]:
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _put_together(line: str, draw: random.Random) -> tuple[str, list[str]]:
    """Return a line of secret.txt with values in it, and these values."""
    values = []

    def value(found: re.Match[str]) -> str:
        kind, length = found[1], int(found[2] or 0)
        if kind in "-n":
            return {"-": "-----", "n": "\n"}[kind]
        made = draw.choice(PASSWORDS) if kind == "p" else "".join(draw.choices(LETTERS[kind], k=length))
        if length >= 8:  # letters and digits, as nearly all tokens have
            made = f"{made[:-2]}{'7' if kind == 'd' else draw.choice('AB' if kind == 'u' else 'ab')}7"
        values.append(made)
        return made

    return re.sub(r"\{([-npahud])(\d*)\}", value, line), values


def _words_of(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # prose with an apostrophe
        return line.split()


def test_no_secret_of_the_list_stays() -> None:
    offenders = []
    for line in _lines("secret.txt"):
        draw = random.Random(line)
        for _ in range(NUM_DRAWS):
            made, values = _put_together(line, draw)
            shown, words = Redaction().text(made), Redaction().command(_words_of(made))
            is_right = (
                not any(value in shown or value in " ".join(words) for value in values)
                and len(words) == len(_words_of(made))
                and Redaction().text(shown) == shown
                and Redaction().command(words) == words
            )
            offenders += [] if is_right else [(line, made, shown, words)]
    assert offenders == []


def test_nothing_harmless_of_the_list_changes() -> None:
    offenders = [
        line
        for line in _lines("harmless.txt")
        if Redaction().text(line) != line or Redaction().command(_words_of(line)) != _words_of(line)
    ]
    assert offenders == []


def test_the_lists_are_long_and_hold_no_line_twice() -> None:
    for name, min_lines in (("secret.txt", 200), ("harmless.txt", 300)):
        assert len(set(_lines(name))) == len(_lines(name)) >= min_lines
    told = (DATA.parents[2] / "docs" / "recorded-data.md").read_text(encoding="utf-8")
    assert f"{len(_lines('secret.txt'))} with secrets" in told and f"{len(_lines('harmless.txt'))} harmless" in told


@each_case("name", SECRET_NAMES)
def test_a_name_tells_of_a_secret(name: str) -> None:
    assert is_secret(name, SECRET)


@each_case("name", HARMLESS_NAMES)
def test_a_name_that_only_resembles_one_of_a_secret_tells_of_none(name: str) -> None:
    assert not is_secret(name, SECRET)


@each_case("value", ["", "true", "False", "none", "auto"])
def test_a_switch_is_no_secret(value: str) -> None:
    assert not is_secret("--use-auth-token", value)


@each_case(
    ("name", "value", "is_hidden"),
    [("--token", "128", False), ("--key", "3.5", False), ("--token", "123456", True), ("--password", "1234", True)],
)
def test_a_small_number_is_a_secret_only_where_the_name_leaves_no_doubt(name: str, value: str, is_hidden: bool) -> None:
    assert is_secret(name, value) == is_hidden


@each_case(
    ("line", "expected"),
    [
        ("train.py --wandb-key=correct-horse-7 --lr 3", "train.py --wandb-key=[redacted] --lr 3"),
        ("train.py --wandb-key correct-horse-7 --lr 3", "train.py --wandb-key [redacted] --lr 3"),
        ("train.py --wandb-key correct-horse-7 data.txt", "train.py --wandb-key [redacted] data.txt"),
        ("train.py -token correct-horse-7", "train.py -token [redacted]"),
        ("train.py --password -correct-horse-7", "train.py --password [redacted]"),
        ("train.py --password --lr 3", "train.py --password --lr 3"),
        ("train.py --api-keys correct-horse-7 b7 --lr 3", "train.py --api-keys [redacted] [redacted] --lr 3"),
        ("env WANDB_KEY=correct-horse-7 python train.py", "env WANDB_KEY=[redacted] python train.py"),
        ("train.py +logger.api_key=correct-horse-7", "train.py +logger.api_key=[redacted]"),
        ("srun --export=ALL,A_KEY=correct-horse-7 train.py", "srun --export=ALL,A_KEY=[redacted] train.py"),
        ("srun --env=DB_PASSWORD=a=correct-horse-7&b train.py", "srun --env=DB_PASSWORD=[redacted] train.py"),
        ("train.py '--password=correct horse \"7'", "train.py '--password=[redacted]'"),
        ("""train.py '{"wandb": {"api_key": "correct-horse-7"}, "lr": 3}'""",
         """train.py '{"wandb": {"api_key": "[redacted]"}, "lr": 3}'"""),
        ("bash -c 'export HF_TOKEN=correct-horse-7; python train.py --lr 3'",
         "bash -c 'export HF_TOKEN=[redacted] python train.py --lr 3'"),
        ("bash -c 'python train.py --wandb-key correct-horse-7 --lr 3'",
         "bash -c 'python train.py --wandb-key [redacted] --lr 3'"),
        ("curl -H 'X-Api-Key: correct-horse-7'", "curl -H 'X-Api-Key: [redacted]'"),
        ("curl -H 'Authorization: Basic dXNlcjpwYXNz'", "curl -H 'Authorization: [redacted]'"),
    ],
)  # fmt: skip
def test_a_command_line_keeps_its_words_and_loses_its_secrets(line: str, expected: str) -> None:
    assert Redaction().command(shlex.split(line)) == shlex.split(expected)


@each_case(
    "line",
    [
        "train.py --key-padding-mask=left --num-tokens 128 --tokenizer gpt2 --max-tokens=5 --pad-token '<pad>'",
        "train.py --use-auth-token true --sort-key length --api rest --num-key-value-heads 8",
        "srun --export=ALL,NCCL_IB_PKEY=0x7fff,NCCL_DEBUG=INFO -c 4 python train.py",
        "train.py --data s3://bucket/key/part-0 --hub https://huggingface.co/gpt2?revision=main --repo ssh://git@host/a",
        "train.py --task-name risk-management-of-2024-portfolio --host n1:29500 --mail a@b.de",
        "train.py --lr=3e-4 --betas 0.9 0.95 --resume runs/17-gpt2/checkpoints/step-00000100 --seed 1234567",
        'train.py \'{"optimizer": {"lr": 0.1}, "max_tokens": 5, "tokenizer": "gpt2"}\'',
        "train.py 4f2c1d3b5a69788796a5b4c3d2e1f00112233445",
    ],
)
def test_a_command_line_without_secrets_stays_as_it_was(line: str) -> None:
    assert Redaction().command(shlex.split(line)) == shlex.split(line)


@each_case("secret", [HUGGING_FACE, GITHUB, OPENAI, AWS, JWT, f"glpat-{'aB3dE6gH9jK2' * 2}"])
@each_case("text", ["{}", "train.py {}", "cannot open '{}'", "x={}&y", "https://host/{}/a", '"{}"'])
def test_a_token_of_known_shape_is_found_anywhere(secret: str, text: str) -> None:
    assert Redaction().text(text.format(secret)) == text.format(MARK)


@each_case(
    ("text", "expected"),
    [
        ("https://me:correct-horse-7@host:80/a", "https://[redacted]@host:80/a"),
        ("proxy=http://me:cor@rect#7?@host", "proxy=http://[redacted]@host"),
        ("git clone https://correct-horse-7@host/a.git", "git clone https://[redacted]@host/a.git"),
        (
            "postgres://me:correct-horse-7@host,redis://:correct-horse-7@host2",
            "postgres://[redacted]@host,redis://[redacted]@host2",
        ),
        ("https://host/a?token=correct-horse-7&x=1", "https://host/a?token=[redacted]&x=1"),
        ("https://host/a?x=1&sig=correct-horse-7", "https://host/a?x=1&sig=[redacted]"),
        ("Bearer abcdefghijklmnop", "Bearer [redacted]"),
        ("['curl', '--token', 'correct-horse-7'] failed", "['curl', '--token', '[redacted]'] failed"),
        ("password: correct-horse-7", "password: [redacted]"),
        ("api_key: correct-horse-7", "api_key: [redacted]"),
        (r'"{\"api_key\": \"correct-horse-7\"}"', r'"{\"api_key\": \"[redacted]\"}"'),
        ("os.environ['HF_TOKEN']='correct-horse-7'", "os.environ['HF_TOKEN']='[redacted]'"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "[redacted]"),
    ],
)
def test_a_text_loses_its_secrets(text: str, expected: str) -> None:
    assert Redaction().text(text) == expected


@each_case(
    "text",
    [
        "unexpected token: end of file",
        "no key: the file has none",
        "unknown key 'tokens' in [train]: the keys are preset, mesh",
        "rank 3 on n1 is out of memory after 3.1 GiB: lower --batch-size (8) (tensor of 128 tokens)",
        "HPCPACE_TRACE_MAX_ROWS: trace.max_rows is 'x': expected a whole number",
        "cannot make the run directory runs/17-gpt2: Permission denied",
        "bearer of bad news",
    ],
)
def test_a_message_without_secrets_stays_as_it_was(text: str) -> None:
    assert Redaction().text(text) == text


def test_variables_lose_secrets_by_name_and_by_value() -> None:
    environ = {
        "NCCL_X_TOKEN": SECRET,
        "NCCL_IB_PKEY": "0x7fff",
        "NCCL_NET_PLUGIN": f"http://me:{SECRET}@host/plugin",
        "NCCL_TUNER": HUGGING_FACE,
        "NCCL_DEBUG": "INFO",
    }
    assert Redaction().variables(environ) == {
        "NCCL_X_TOKEN": MARK,
        "NCCL_IB_PKEY": "0x7fff",
        "NCCL_NET_PLUGIN": f"http://{MARK}@host/plugin",
        "NCCL_TUNER": MARK,
        "NCCL_DEBUG": "INFO",
    }


def test_a_secret_of_the_environment_is_found_where_nothing_else_tells_of_it() -> None:
    redaction = Redaction.of({"WANDB_API_KEY": SECRET, "HF_TOKEN_PATH": "/home/me/token"})
    assert redaction.command(["wandb", "login", SECRET]) == ["wandb", "login", MARK]
    assert redaction.text(f"cannot log in as {SECRET}!") == f"cannot log in as {MARK}!"
    assert redaction.text("/home/me/token") == "/home/me/token"


@pytest.mark.parametrize("command", [["--db-password", SECRET], [f"--db-password={SECRET}"]])
def test_a_secret_of_the_command_line_is_found_in_messages(command: list[str]) -> None:
    assert Redaction.of({}, command).text(f"refused: {SECRET}") == f"refused: {MARK}"


def test_a_short_value_is_not_sought_in_other_words() -> None:
    assert Redaction.of({"DB_PASSWORD": "train"}).text("train.py") == "train.py"


def test_nested_content_loses_its_secrets_and_keeps_its_form() -> None:
    content = {
        "wandb": {"api_key": SECRET, "project": "gpt2", "enabled": True},
        "credentials": {"user": "me", "word": SECRET},
        "password": 123456,
        "command": ["train.py", "--token", SECRET],
        "num_tokens": 128,
        "losses": [1.5, 2.5],
        "none": None,
        "rows": [{"token": SECRET}],
    }
    assert Redaction().content(content) == {
        "wandb": {"api_key": MARK, "project": "gpt2", "enabled": True},
        "credentials": MARK,
        "password": MARK,
        "command": ["train.py", "--token", MARK],
        "num_tokens": 128,
        "losses": [1.5, 2.5],
        "none": None,
        "rows": [{"token": MARK}],
    }


def test_redacting_twice_changes_nothing_more() -> None:
    environ = {"A_TOKEN": SECRET, "URL": f"https://me:{SECRET}@host?token={SECRET}&x=1", "NOTE": f"Bearer {JWT}"}
    words = ["--key", SECRET, f"--a-secret={SECRET}", json.dumps({"password": SECRET}), f"--token {SECRET}"]
    redaction = Redaction()
    once = redaction.content({"environment": environ, "command": words, "note": f"password: {SECRET}"})
    assert SECRET not in json.dumps(once)
    assert redaction.content(once) == once


PIECES = [
    *("a=", "a=a=a=", "api=", "key=", "key ", "key key ", "-", "- ", "a.", "a@", "  ", "\\", "--key ", "a&token="),
    *(
        "password='",
        "token:",
        "token: ",
        "password is ",
        "key is ",
        "<password>",
        "password ",
        "pin is 1234 ",
        "key = a(",
    ),
    *(
        "http://",
        "://",
        "x/hooks/",
        "https://a/hooks/",
        "hook",
        "bearer ",
        "basic ",
        "authorization: a ",
        "eyJ-",
        "sk-",
    ),
    *("-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "PuTTY-User-Key-File-3", "AKIA", "ATATT", "xoxb-", "1", "a1"),
    *("machine ", "machine h login u password p ", "login -p x ", "curl ", "curl -u ", "sshpass -p", "wandb login "),
]


def _used_s(text: str) -> float:
    begin_s = time.process_time()
    Redaction().command([text])
    Redaction().text(text)
    return time.process_time() - begin_s


@each_case("piece", chosen(PIECES, 16))
def test_a_long_text_does_not_take_the_square_of_its_length(piece: str) -> None:
    # 0.3 s at most; where the square of the length was needed, it was 5 s and more.
    assert _used_s(piece * (60_000 // len(piece))) < 2


def test_quotation_marks_that_never_close_are_sought_only_a_few_times() -> None:
    assert _used_s("".join(f"password={chr(92) * num}'" for num in range(1000, 0, -1))) < 2


def test_a_long_value_is_taken_out_as_a_whole() -> None:
    assert Redaction().text(f"token={'a1' * 5000} --lr 3") == f"token={MARK} --lr 3"


@each_case("option", ["--db-pw", "--dbpw", "--pin", "--user-pin", "--tk", "--hub-tk", "--tokens", "--hub-tokens"])
@each_case("value", ["X", "hunter", "s3cr3t", "abc,def"])
def test_a_short_value_of_an_option_for_secrets_is_one(option: str, value: str) -> None:
    redaction = Redaction()
    assert redaction.command([option, value]) == [option, MARK]
    assert redaction.command([f"{option}={value}"]) == [f"{option}={MARK}"]
    assert redaction.text(f"t.py {option} {value} --lr 1") == f"t.py {option} {MARK} --lr 1"


@each_case("words", ["--pin numa", "--pin 0-7", "--tokens 10B", "--tokens all", "--tokens data/a.bin", "--tk 8"])
def test_a_place_or_a_quantity_of_such_an_option_is_none(words: str) -> None:
    assert Redaction().command(words.split()) == words.split()
