"""The site: the repository's Markdown as it stands, and the docstrings. ``make docs`` builds it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
(release,) = re.findall(r'^__version__ = "(.*)"', (ROOT / "fdora/__init__.py").read_text(), re.M)
(source,) = re.findall(r'^Source = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)

project = "fdora"
copyright = "the fdora authors, Apache License 2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"fdora {release}"
html_theme_options = {"source_repository": source, "source_branch": "main", "source_directory": ""}
html_static_path = ["site.css"]
html_css_files = ["site.css"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "bench/NOTES.md", "bench/RESULTS.md"]
exclude_patterns = [".*", "build", "fdora", "tests"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
suppress_warnings = ["ref.python"]  # an argument called c is no reference to the field c of two tuples

MENU = {
    "Start": ["docs/start", "docs/peft", "docs/trainers", "docs/faq", "docs/migrate"],
    "Tasks": ["docs/serving", "docs/training-many", "docs/conversion", "docs/predict"],
    "Reference": ["docs/api", "docs/semantics", "docs/layers", "docs/quantised", "docs/distributed"],
    "Measured": ["docs/benchmarks", "bench/RESULTS", "bench/NOTES"],
    "Project": ["CONTRIBUTING", "CHANGELOG"],
}


def complete(app, name, source):
    """What a code host cannot show: the menu, and the docstrings of each module on the page of the API."""
    if name == "README":
        for caption, pages in MENU.items():
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
    if name == "docs/api":
        docstrings = "\n```{eval-rst}\n.. automodule:: \\1\n   :members:\n```\n\n"
        source[0] = re.sub(r"^## (fdora\S*)\n.*?(?=^## |\Z)", rf"\g<0>{docstrings}", source[0], flags=re.M | re.S)


def as_text(app, what, name, obj, options, lines):
    """Docstrings indent code by four after an empty line, where reStructuredText wants ``::``; a bar is a bar."""
    lines[:] = [re.sub(r"(``.*?``)|\|", lambda found: found[1] or r"\|", line) for line in lines]
    for i in reversed(range(1, len(lines))):
        if lines[i].startswith("    ") and not lines[i - 1]:
            before = next((line for line in reversed(lines[:i]) if line), "")
            if not before.startswith("    "):
                lines[i:i] = ["::", ""]


def setup(app):
    app.connect("source-read", complete)
    app.connect("autodoc-process-docstring", as_text, priority=400)  # before napoleon
