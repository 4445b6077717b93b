"""Hooks of the documentation site: pages from the repository's root, and links out of docs/.

README.md is the site's first page; the others of `PAGES` are pages too. Their links, and links of
docs/ to files elsewhere in the repository (examples, source), are correct on the repository's host. Here they are
rewritten: to a page of the site if it is one, else to the file in the repository. A link to no file is left as it is,
and MkDocs reports it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository's root, and the names of their pages."""

LINK = re.compile(r"(\]\(|^\[[^\]]+\]:\s+)(?![a-z]+:|#|/)([^)\s#]+)(#[^)\s]*)?", re.MULTILINE)
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri
    source = next((name for name, uri in PAGES.items() if uri == here), f"docs/{here}")

    def rewritten(match: re.Match[str]) -> str:
        opening, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in PAGES or path.startswith("docs/"):
            uri = PAGES.get(path) or path.removeprefix("docs/")
            target = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        elif (ROOT / path).exists():
            target = f"{config.repo_url.rstrip('/')}/blob/main/{path}"
        return f"{opening}{target}{anchor}"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(rewritten, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(rewritten, markdown[end:])])
