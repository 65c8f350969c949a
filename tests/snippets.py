"""The code blocks of docs/peft.md and docs/trainers.md, for the tests that run them."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "trainers.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)) | {"PEFT": (DOCS / "peft.md").read_text()}
SNIPPETS = {
    (section, language): code
    for section, text in SECTIONS.items()
    for language, code in re.findall(r"```(\w+)\n(.*?)```", text, re.S)
}


def snippet(section, language):
    return SNIPPETS[section, language]


def execute(section, **given):
    """The section's program, with these names defined; what it defines."""
    space = {"__name__": "docs", **given}
    exec(compile(snippet(section, "python"), f"docs/{section}", "exec"), space)
    return space
