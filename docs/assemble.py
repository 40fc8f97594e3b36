"""Assembles the pages of the site in build/docs; `make docs` runs it before the site generator.

Pages are written for readers of the repository, and so are their links.  Here they become the site's: README.md is its home, the
other pages of the root stand beside those of docs/, and a linked source file becomes a page of its own.  The table of recipe keys
is made from the configs.  Exits with 1 on a link to a file that does not exist, or a public name without a page.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from itertools import groupby
from pathlib import Path

import nestpipe
from nestpipe.config.describe import RecipeKey, describe
from nestpipe.data.kinds import KINDS as DATA
from nestpipe.models.kinds import KINDS as MODELS

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "docs"
FROM_ROOT = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
SOURCES = (".py", ".toml")
RECIPE_KEYS = "<!-- recipe keys -->"
LINK = re.compile(r"(\[[^\]]*\])\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def place(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path in FROM_ROOT:
        return FROM_ROOT[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(SOURCES):
        return f"source/{path}.md"
    raise ValueError(f"{path} has no place on the site")


def with_site_links(text: str, page: str, linked: set[str]) -> str:
    """The text of a page of the repository with links that fit the site.  `linked` collects source files that it links to."""

    def site_link(found: re.Match[str]) -> str:
        words, (target, hash_sign, heading) = found[1], found[2].partition("#")
        if not target or ":" in target:
            return found[0]
        path = os.path.normpath(Path(page).parent / target)
        if not (ROOT / path).is_file():
            raise ValueError(f"{page} links to {target}, which does not exist")
        if path.endswith(SOURCES):
            linked.add(path)
        return f"{words}({os.path.relpath(place(path), Path(place(page)).parent)}{hash_sign}{heading})"

    # Code is left alone: a Python call after an index looks like a link.
    return "".join(part if part.startswith("```") else LINK.sub(site_link, part) for part in FENCE.split(text))


def source_page(path: str) -> str:
    """A page with one source file, left out of the search."""
    language = {".py": "python", ".toml": "toml"}[Path(path).suffix]
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n~~~~ {language}\n{(ROOT / path).read_text()}~~~~\n"


def recipe_keys() -> str:
    """All keys of a recipe, a table for each section and kind."""

    def title(key: RecipeKey) -> str:
        section = key.key.partition(".")[0]
        return "A recipe" if section == key.key else f"`[{section}]`" + (f" of kind `{key.kind}`" if key.kind else "")

    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    parts = []
    for heading, keys in groupby(describe(DATA, MODELS), key=title):
        lines = [f"## {heading}", "", "| key | must be | default | what it does |", "| --- | --- | --- | --- |"]
        lines += [f"| `{k.key}` | {cell(k.type)} | `{cell(k.default)}` | {cell(k.help)} |" for k in keys]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def check_public_names(api: str) -> None:
    """Every class of `nestpipe.__all__` is on an API page; old names of one are not."""
    found = {name: getattr(nestpipe, name) for name in nestpipe.__all__}
    missing = [n for n, what in found.items() if getattr(what, "__name__", "") == n and f".{n}\n" not in api]
    if missing:
        raise ValueError(f"docs/api has no page for {', '.join(missing)}")


def assemble() -> None:
    shutil.rmtree(SITE, ignore_errors=True)
    pages = [*FROM_ROOT, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
    linked: set[str] = set()
    texts = {
        place(page): with_site_links((ROOT / page).read_text(), page, linked).replace(RECIPE_KEYS, recipe_keys())
        for page in pages
    }
    texts |= {place(path): source_page(path) for path in sorted(linked)}
    check_public_names("".join(text for page, text in texts.items() if page.startswith("api/")))
    for page, text in texts.items():
        (SITE / page).parent.mkdir(parents=True, exist_ok=True)
        (SITE / page).write_text(text)
    for path in (ROOT / "docs").rglob("*"):
        if path.suffix in (".svg", ".css"):
            shutil.copy(path, SITE / path.relative_to(ROOT / "docs"))


if __name__ == "__main__":
    try:
        assemble()
    except ValueError as error:
        sys.exit(f"docs: {error}")
