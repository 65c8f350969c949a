"""The code blocks of docs/integrations.md, for the tests that run them."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "integrations.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
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
    exec(compile(snippet(section, "python"), f"docs/integrations.md, {section}", "exec"), space)
    return space
