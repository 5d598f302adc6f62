"""Secrets that are known by their format wherever they are: tokens of well-known services, private keys, webhooks."""

from __future__ import annotations

import re
from collections.abc import Callable

# Prefixes of tokens, as the services and secret scanners document them; behind these come letters and digits only.
_PLAIN = (
    "hf|api_org|gh[pousr]|npm|do[opr]_v1|shp(?:at|ca|pa|ss)|[sprk]k_(?:live|test)|whsec|r8|tgp_v1|nfp|ntn|sbp|lin_api"
    "|figd|rubygems|sntry[su]|ph[xs]|fw"
)
# Behind these come dashes and underscores, too.
_DASHED = (
    "github_pat_|gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct|wt)-|dckr_[po]at_|pypi-|nvapi[-_]|gsk[-_]|sk-"
    "|(?:xai|pplx|csk|tskey|pul|NRAK|PMAK|CFPAT|GOCSPX)-|xapp-|sq0csp-|ATATT|ATCTT|ATBB|hv[sbr]\\.|ya29\\.|1//0|AIza"
    "|wandb_v\\d_|glsa_|ops_"
)
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    rf"(?:{_PLAIN})_(?=[A-Za-z]{{0,200}}\d)[A-Za-z0-9]{{16,}}"
    rf"|(?:{_DASHED})(?=[A-Za-z_-]{{0,200}}\d)[\w-]{{16,}}(?:\.[\w-]+){{0,3}}"
    r"|(?:AKIA|ASIA|ABIA)[A-Z0-9]{16}(?:[\s:,;=/|'\"]{1,4}[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/]))?"
    r"|xox[abceoprs]-[\w-]{10,}|SG\.[\w-]{16,}\.[\w-]{16,}|local-[0-9a-f]{40}|AGE-SECRET-KEY-1[A-Z0-9]{20,}"
    r"|(?:SK|key-|dapi)[0-9a-f]{32}"
    # Telegram and Discord.
    r"|(?:bot)?\d{6,12}:AA[\w-]{20,}|[MNO][A-Za-z0-9]{23,27}\.[\w-]{6}\.[\w-]{27,}"
    r"|eyJ[\w-]{6,600}\.[\w-]{6,}(?:\.[\w-]*)?"
    r")"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN\s[A-Z0-9\s]{0,40}PRIVATE\sKEY[A-Z\s]{0,10}-----.*?"
    r"(?:-----END\s[A-Z0-9\s]{0,40}PRIVATE\sKEY[A-Z\s]{0,10}-----|\Z)"
    r"|PuTTY-User-Key-File-\d.*?(?:Private-MAC:\s\w*|\Z)",
    re.DOTALL,
)
# Whoever knows the path behind `hooks` can post.
_HOOK = re.compile(r"""(?i)(?P<before>(?:web)?hooks?\w{0,4}(?:\.[\w.-]{1,100})?(?::\d{1,5})?/)(?P<path>[^\s'"<>?#]+)""")
_HAS_DIGIT = re.compile(r"\D{0,300}\d")
_MAX_URL = 300
_MIN_HOOK = 8


def without_formats(text: str, mark: Callable[[str], str]) -> str:
    """Return a text without tokens, private keys and webhooks of well-known format.

    Args:
        text: the text.
        mark: returns what stands in place of a secret.
    """
    text = _PRIVATE_KEY.sub(lambda found: mark(found[0]), text)
    text = _HOOK.sub(lambda found: f"{found['before']}{mark(found['path'])}" if _is_hook(found) else found[0], text)
    return _TOKEN.sub(lambda found: mark(found[0]), text)


def _is_hook(found: re.Match[str]) -> bool:
    """Return whether this is in a URL, and not like .git/hooks/pre-commit or a page about webhooks."""
    before = found.string[max(0, found.start() - _MAX_URL) : found.start()]
    is_url = "://" in before and not re.search(r"[\s'\"]", before[before.rindex("://") :])
    return is_url and len(found["path"]) >= _MIN_HOOK and bool(_HAS_DIGIT.match(found["path"]))
