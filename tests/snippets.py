"""The programs of pages, for the tests that run them; of docs/peft.md and docs/trainers.md the code blocks by section."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def programs(page):
    """Those in Python, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


def ran(program, page, space=None):
    """What it defines, beside what stood in ``space`` before."""
    space = {"__name__": "docs"} if space is None else space
    exec(compile(program, page, "exec"), space)
    return space


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
    return ran(snippet(section, "python"), f"docs/{section}", {"__name__": "docs", **given})
