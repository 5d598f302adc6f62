"""Make the picture of a report and the verdict in README.md from the run of `make demo`.

    make demo
    .venv/bin/python docs/pictures/make.py

Needs Chromium (`apt-get install --no-install-recommends chromium`), which takes the picture without a display.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = Path("runs/demo/slow-rank-2")
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "pictures" / "report.png"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZE = (1100, 980)
_VERDICT = re.compile(r"(<!-- verdict of make demo -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Report the run, take the picture of its page, and put its verdict into README.md."""
    report = subprocess.run(
        [sys.executable, "-P", "-m", "hpcpace", "report", str(RUN)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    _, head, rest = report.stdout.partition("\nVerdict ")
    if not head:
        sys.exit(f"no report on {RUN}: run `make demo` first\n{report.stderr}")
    verdict = f"Verdict {rest.partition(chr(10) * 2)[0]}"
    image = f"![The top of the report of {RUN.name}]({PICTURE.relative_to(ROOT)})"
    block = f"{image}\n\n```\n$ hpcpace report {RUN}\n{verdict}\n```\n"
    README.write_text(_VERDICT.sub(lambda found: f"{found[1]}{block}{found[2]}", README.read_text()))
    take_picture(ROOT / RUN / "report.html", PICTURE)
    print(f"written: {README} {PICTURE}")


def take_picture(page: Path, picture: Path) -> None:
    """Save the top of a page as a picture."""
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        sys.exit(f"none of {', '.join(NAMES)} is on PATH: apt-get install --no-install-recommends chromium")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={SIZE[0]},{SIZE[1]}",
                "--virtual-time-budget=5000",
                f"--screenshot={picture}",
                page.resolve().as_uri(),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=120,
        )


if __name__ == "__main__":
    main()
