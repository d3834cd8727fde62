"""Host: what MkDocs needs besides docs/. mkdocs.yml names this module as a hook.

README.md is the start page, a file that a page links to has a page of its own, and docs/api.md gets the docstrings of
the public names. Links stay as they are in the Markdown, where GitHub resolves them too.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

from dapo_jax import _MODULES

ROOT = Path(__file__).resolve().parents[2]
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
SOURCES = "source"  # folder of the site for files outside docs/
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}
DOCSTRINGS = "<!-- docstrings -->"  # the line of docs/api.md that they replace
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages that are not in docs/."""
    texts = {uri: (ROOT / path).read_text(encoding="utf-8") for path, uri in TOP.items()}
    texts |= {file.src_uri: file.content_string for file in files.documentation_pages()}
    linked = {path for uri, text in texts.items() for path in _outside(uri, text)}
    for uri in TOP.values():
        files.append(File.generated(config, uri, content=texts[uri]))
    for path in sorted(linked):
        files.append(File.generated(config, _page(path), content=_source(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its docstrings, and with links to places in the site instead of the repository."""
    uri = page.file.src_uri
    markdown = markdown.replace(DOCSTRINGS, _docstrings())
    if uri.startswith(f"{SOURCES}/"):
        return markdown
    folder = posixpath.dirname(uri)

    def in_site(link: re.Match[str]) -> str:
        path = _in_repository(uri, link[1])
        target = TOP.get(path) or (_page(path) if _is_added(path) else path.removeprefix("docs/"))
        return posixpath.relpath(target, folder or ".")

    return _in_prose(markdown, in_site)


def on_page_content(html: str, **_: Any) -> str:
    """The page without the backslash of `a \\| b` in the code of a table, which GitHub leaves out too."""
    return re.sub(r"<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)


def _docstrings() -> str:
    """mkdocstrings' lines for what `import dapo_jax` offers."""
    return "\n\n".join(f"::: dapo_jax.{module}.{name}" for name, module in _MODULES.items())


def _outside(uri: str, text: str) -> Iterator[str]:
    """What a page links to that MkDocs does not have."""
    paths = (_in_repository(uri, link[1]) for link in LINK.finditer(FENCED.sub("", text)))
    return (path for path in paths if _is_added(path))


def _is_added(path: str) -> bool:
    """Whether it is a folder, or a file outside docs/ that is no page of its own."""
    return path not in TOP and (not path.startswith("docs/") or (ROOT / path).is_dir())


def _in_repository(uri: str, link: str) -> str:
    """The path that a page's link means, from the root of the repository."""
    folder = "" if uri in TOP.values() else posixpath.dirname(f"docs/{uri}")
    return posixpath.normpath(posixpath.join(folder, link))


def _in_prose(markdown: str, replace: Any) -> str:
    """The text with its links replaced, except in fenced code."""
    ends = [0, *(place for block in FENCED.finditer(markdown) for place in block.span()), len(markdown)]
    parts = [markdown[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    return "".join(part if number % 2 else LINK.sub(replace, part) for number, part in enumerate(parts))


def _page(path: str) -> str:
    """The page that shows a file or a folder of the repository."""
    return f"{SOURCES}/{path}.md"


def _source(path: str) -> str:
    """A file as a code block, or the names in a folder."""
    place = ROOT / path
    head = f"---\nsearch:\n  exclude: true\n---\n# `{path}`\n\n"
    if place.is_dir():
        names = sorted(entry.name for entry in place.iterdir() if not entry.name.startswith("__"))
        return head + "".join(f"- `{name}`\n" for name in names)
    language = LANGUAGES.get(place.suffix, "text")
    return f"{head}````{language}\n{place.read_text(encoding='utf-8')}````\n"
