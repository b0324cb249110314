"""What the documentation's site needs beside MkDocs' own: hooks of mkdocs.yml, and an extension that reads docstrings.

The pages are written for GitHub, where a link may lead to any file of the repository. On the site such a file gets a
page of its own, under ``files/``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

_LINK = re.compile(r"(?<=\]\()(?!https?:)[^)#\s]+")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`(~?)([^`]+)`")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of linked files outside of docs/, and of those that these link to."""
    pending = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    seen = set(pending)
    for page in pending:
        for path in _linked(page) - seen:
            seen.add(path)
            if not path.is_relative_to(DOCS):
                pending.append(path)
                files.append(File.generated(config, _address(path), content=_shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to pages of the site; ``python run``, which the tests read, is no language of code."""
    here, shown = page.file.src_uri, page.file.src_uri.removeprefix("files/")
    source = DOCS / here if here == shown else ROOT / shown

    def on_site(link: re.Match[str]) -> str:
        target = (source.parent / link[0]).resolve()
        return posixpath.relpath(_address(target), posixpath.dirname(here)) if target.is_file() else link[0]

    return re.sub(r"^```python run$", "```python", _LINK.sub(on_site, markdown), flags=re.MULTILINE)


def _linked(page: Path) -> set[Path]:
    """The files of the repository that a page links to."""
    links = _LINK.findall(page.read_text()) if page.suffix == ".md" else []
    return {target for link in links if (target := (page.parent / link).resolve()).is_file()}


def _address(path: Path) -> str:
    """Where the site has a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"files/{path.relative_to(ROOT).as_posix()}" + ("" if path.suffix == ".md" else ".md")


def _shown(path: Path) -> str:
    """A file of the repository as a page."""
    text = path.read_text()
    language = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml"}.get(path.suffix, "text")
    return text if path.suffix == ".md" else f"# {path.relative_to(ROOT)}\n\n~~~~{language}\n{text}~~~~\n"


class Roles(griffe.Extension):
    """Sphinx's roles in docstrings become links, where the reference has what they name."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = _ROLE.sub(self._link, obj.docstring.value)

    def _link(self, role: re.Match[str]) -> str:
        name = role[2].rpartition(".")[2] if role[1] else role[2]
        return f'<autoref optional identifier="{role[2]}"><code>{name}</code></autoref>'
