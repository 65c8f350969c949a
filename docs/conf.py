"""The site: the repository's Markdown as it stands, and the docstrings. ``make docs`` builds it."""

import re

project = "fdora"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "bench/NOTES.md"]
exclude_patterns = [".*", "build", "fdora", "tests"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
suppress_warnings = ["ref.python"]  # an argument called c is no reference to the field c of two tuples


def complete(app, name, source):
    """What a code host cannot show: the menu, from README's links, and the docstrings of each module in the reference."""
    if name == "README":
        linked = re.findall(r"\]\(([\w/]+)\.md\)", source[0])
        others = sorted(app.project.docnames - {"README", *linked})
        pages = "\n".join(dict.fromkeys([*linked, *others]))
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"
    if name == "docs/reference":
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
