"""Names whose values are secrets, and values that look like secrets.

The words of a name decide: `--wandb-key` and `HF_TOKEN` name secrets, `--key-padding-mask` and `--max-tokens` do not.
docs/recorded-data.md has the rules.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise


class Certainty(IntEnum):
    """Which values of a name are secrets."""

    NONE = 0
    POSSIBLE = 1
    """Those that look like one: `--tokens`, `--pin`."""
    LIKELY = 2
    """All but switches and small numbers: `--token`, `--key`."""
    SURE = 3
    """All but switches: `--password`."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# One of these anywhere in a name makes its value a secret.
_SECRETS = _words(
    "passcode passwort sshpass jwt bearer credential credentials cred creds authorization cookie cookies accesskey "
    "secretkey privatekey authkey apitoken accesstoken authtoken refreshtoken sessiontoken"
)
# So does a word with such an end: PGPASSWORD.
_SECRET_ENDS = ("password", "passwd", "passphrase", "secret", "apikey", "passwords", "secrets", "apikeys")
# sudo's NOPASSWD.
_NO_SECRETS = _words("nopasswd nopassword")
# Two words that together mean one of the above, also in the plural.
_PAIRS = frozenset(
    [(first, "key") for first in ("api", "access", "auth", "private", "signing", "encryption", "account")]
    + [(first, "token") for first in ("api", "access", "auth", "refresh", "session", "bearer")]
)
# A name that ends with one of these means something about a secret, like the file that it is in.
_ABOUT = _words(
    "file files path dir folder stdin prompt env type kind mode method policy length len size count num ttl timeout "
    "expiry expires age interval"
)
# Words that may follow the one that counts.
_AFTER = _words("value id string str text data pem prod dev test new old primary")
_BEFORE_TOKEN = _words(
    "pad padding eos bos unk unknown sep cls mask image img video audio visual vision text special stop start end "
    "begin next prev previous last first num n max min per each every of total avg mean single class register "
    "local global dispatch drop word sub by input output target prompt newline decoder encoder multi route "
    "placeholder extra new added is use has no reserved fim think tool eod eot eom speech unconditional null page"
)
# These only count as the last word of a name, and not after any of the given words.
_HARMLESS_BEFORE = {
    "token": _BEFORE_TOKEN,
    "key": _words(
        "sort group primary foreign cache partition padding pad mask query host hash seq batch input output image img "
        "text label target index dict state model metric monitor column row map json config param parameter lookup by "
        "num n per public hot feature sample loss reward answer prompt question caption video audio dataset field "
        "shard bucket rng random prng seed is use has no order weight weights module layer attention missing "
        "unexpected duplicate unknown bad value data rel pos checkpoint ckpt teacher student ema proj split class "
        "category score time lang source "
        "src tgt part"
    ),
    "auth": _words("no use with enable disable require requires required skip has is without"),
    "pass": _words(
        "forward backward first second third single two three multi num n one per each every low high band by fast "
        "slow is no last next optimizer full"
    ),
    "pw": frozenset(),
    "pswd": frozenset(),
    "psk": frozenset(),
    "otp": frozenset(),
    "pat": _words("file name glob search"),
    "pwd": _words("old"),
    "api": frozenset(),
    "tokens": _BEFORE_TOKEN,
    "tk": frozenset(),
    "tok": frozenset(),
    "pin": _words("cpu gpu core thread numa"),
    "sig": frozenset(),
}
# Words that mean something else on their own: PWD is a folder.
_NEVER_ALONE = _words("pwd pat")
# The fewest characters of a value that these words make a secret: `--api rest-v1` is none.
_POSSIBLE = {"api": 12, "tokens": 8, "tk": 8, "tok": 16, "pin": 8, "sig": 8}
_MIN_PIN = 4
# Some of these are written as options far more often for a secret than for anything but these values.
_HARMLESS_VALUES = {
    "tokens": _words("all bpe byte bytes char chars character unigram word words subword sentencepiece"),
    "tk": frozenset[str](),
    "pin": _words(
        "all close compact core cores cpu cpus device gpu gpus host memory node nodes numa scatter socket "
        "sockets spread strict thread threads"
    ),
}
_NUMBERS_OR_MARKERS = re.compile(r"[\d.,:;_eE+-]+|<.*>|\[.*\]|'<.*>'")
# Or nothing that could be one: `key=[]`, `token=%s`.
_SWITCH = re.compile(r"[\W_]*|%[a-z]|true|false|yes|no|on|off|none|null|auto|default", re.IGNORECASE)
_AUTH_METHODS = _words("basic digest kerberos gssapi ldap munge oauth oauth2 oidc saml ssh ssl tls x509 token jwt key")
_SMALL_NUMBER = re.compile(r"[-+]?\d{1,5}|[-+]?\d*\.\d*(e[-+]?\d+)?|[-+]?\d+e[-+]?\d+", re.IGNORECASE)
# `model.layers.0.weight` is a parameter.
_PARAMETER = re.compile(r"[A-Za-z_]\w*(?:\.\w+){2,}")
_MIXED = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[\w+=~@!^&#$%*?-][\w+/=.~@!^&#$%*?-]*")
_PATH_OR_QUANTITY = re.compile(r"\.{1,2}/.*|[\d_,.]+[A-Za-z]{1,3}|.*\.[a-z]{1,5}\d?|(?=.{,31}\Z)[^/]*/.*")
_MAX_NAME = 300
# What follows has no bearing on whether a value is a switch, a number or random.
_MAX_VALUE = 200


def is_secret(name: str, value: str = "secret") -> bool:
    """Return whether a value is a secret, judging by its name.

    Args:
        name: name of an option, a variable or a key.
        value: its value; under most names, switches and small numbers are not secrets.
    """
    word, certainty = telling_word(name)
    value = value[:_MAX_VALUE]
    if certainty == Certainty.NONE or _SWITCH.fullmatch(value):
        return False
    if certainty == Certainty.SURE:
        return True
    if certainty == Certainty.POSSIBLE:
        if is_pin(name, value) or looks_secret(value, _POSSIBLE[word]):
            return True
        return name.startswith("-") and word in _HARMLESS_VALUES and not _is_harmless(word, value)
    is_parameter = word in ("key", "token") and _PARAMETER.fullmatch(value)
    is_method = word == "auth" and value.lower() in _AUTH_METHODS
    return not (_SMALL_NUMBER.fullmatch(value) or is_parameter or is_method)


def is_pin(name: str, value: str) -> bool:
    """Return whether a value is that of a PIN, of digits only."""
    return len(value) >= _MIN_PIN and value[:_MAX_VALUE].isdecimal() and telling_word(name)[0] == "pin"


def _is_harmless(word: str, value: str) -> bool:
    is_known = value.lower() in _HARMLESS_VALUES[word]
    return bool(is_known or _NUMBERS_OR_MARKERS.fullmatch(value) or _PATH_OR_QUANTITY.fullmatch(value))


def telling_word(name: str) -> tuple[str, Certainty]:
    """Return the word of a name that shows its value to be a secret, empty without any, and how certain that is."""
    return _telling_word(name[-_MAX_NAME:])


def looks_secret(value: str, min_length: int) -> bool:
    """Return whether a value looks like a secret: letters and digits mixed, and no path, quantity or parameter."""
    return (
        len(value) >= min_length
        and bool(_MIXED.fullmatch(value))
        and not _PATH_OR_QUANTITY.fullmatch(value)
        and not _PARAMETER.fullmatch(value)
        and value.lower() not in _AUTH_METHODS
    )


@lru_cache(maxsize=4096)
def _telling_word(name: str) -> tuple[str, Certainty]:
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT:
        return "", Certainty.NONE
    sure = [word for word in words if word in _SECRETS or (_ends_as_secret(word) and word not in _NO_SECRETS)]
    sure += [" ".join(pair) for pair in pairwise(words) if (pair[0], pair[1].removesuffix("s")) in _PAIRS]
    if sure:
        return sure[0], Certainty.SURE
    while len(words) > 1 and words[-1] in _AFTER:
        words.pop()
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last not in _HARMLESS_BEFORE or before in _HARMLESS_BEFORE[last] or (not before and last in _NEVER_ALONE):
        return "", Certainty.NONE
    return last, Certainty.POSSIBLE if last in _POSSIBLE else Certainty.LIKELY


def _ends_as_secret(word: str) -> bool:
    return word.endswith(_SECRET_ENDS) or (word.endswith("pw") and len(word) > len("bpw"))  # bits per weight
