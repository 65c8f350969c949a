"""What pyproject.toml cannot say: links of README.md that work on a package index, too."""

import re
from pathlib import Path

from setuptools import setup

ROOT = "https://github.com/fdora/fdora"


def absolute(link: re.Match) -> str:
    path = link[1]
    return f"]({ROOT}/raw/main/{path}?sanitize=true)" if path.endswith(".svg") else f"]({ROOT}/blob/main/{path})"


readme = re.sub(r"\]\((?!https?:|#)([^)]+)\)", absolute, Path("README.md").read_text(encoding="utf-8"))
setup(long_description=readme, long_description_content_type="text/markdown")
