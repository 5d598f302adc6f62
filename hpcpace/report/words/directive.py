"""A line for a job script inside a sentence."""

from __future__ import annotations

import re

DIRECTIVE = re.compile(r"#SBATCH --[a-z-]+=[\w.,\[\]-]*[\w\]]")
