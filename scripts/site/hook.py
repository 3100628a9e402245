"""What mkdocs runs: the pages that are made from the code, and links that lead out of the docs into the repository."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

sys.path.insert(0, str(Path(__file__).parent))

import error_book  # mkdocs runs this file alone

# The theme takes it from a server of others; the site must work without one.
_SHIM, _OWN_SHIM = "https://unpkg.com/iframe-worker/shim", "assets/iframe-worker.js"
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([\w./-]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the error book."""
    for path, text in error_book.pages().items():
        files.append(File.generated(config, path, content=text))
    shim = (Path(__file__).parent / "iframe-worker.js").read_text()
    files.append(File.generated(config, _OWN_SHIM, content=shim))
    return files


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Let the page load nothing from elsewhere."""
    return output.replace(_SHIM, get_relative_url(_OWN_SHIM, page.url))


def on_post_template(output: str, *, template_name: str, config: Any) -> str:
    """The same for the page that says that there is no such page."""
    return output.replace(_SHIM, _OWN_SHIM)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Name what is only in the repository: the site may lie anywhere."""
    if page.file.src_uri.startswith("errors/"):
        return markdown
    return _OUTSIDE.sub(r"\1 (`\2` in the repository)", markdown)
