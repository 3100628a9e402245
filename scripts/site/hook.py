"""What mkdocs runs: the pages that are made from the code, and links that lead out of the docs into the repository."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

sys.path.insert(0, str(Path(__file__).parent))

import error_book  # mkdocs runs this file alone
import found_by

_HERE = Path(__file__).parent
# The theme searches when a key goes up, which a paste with the mouse does not make; and it takes a message for a query language.
_PASTE, _WORDS = "assets/search-paste.js", "search-words.js"
_WORKERS = "assets/javascripts/workers"
# The theme takes it from a server of others; the site must work without one.
_SHIM, _OWN_SHIM = "https://unpkg.com/iframe-worker/shim", "assets/iframe-worker.js"
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([\w./-]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the error book, and scripts of our own."""
    for path, text in error_book.pages().items():
        files.append(File.generated(config, path, content=text))
    for path in (_OWN_SHIM, _PASTE):
        script = (_HERE / Path(path).name).read_text()
        files.append(File.generated(config, path, content=script))
    return files


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Let the page load nothing from elsewhere."""
    return output.replace(_SHIM, get_relative_url(_OWN_SHIM, page.url))


def on_post_template(output: str, *, template_name: str, config: Any) -> str:
    """The same for the page that says that there is no such page."""
    return output.replace(_SHIM, _OWN_SHIM)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Weigh the page for the search, and name what is only in the repository: the site may lie anywhere."""
    name = page.file.src_uri.removesuffix(".md")
    is_error = name.startswith("errors/")
    weight = found_by.WEIGHTS.get(name, found_by.ERROR if is_error else found_by.GUIDE)
    page.meta["search"] = {"boost": weight}
    if name in found_by.WORDS:
        page.meta["tags"] = list(found_by.WORDS[name])
    if is_error:
        return markdown
    return _OUTSIDE.sub(r"\1 (`\2` in the repository)", markdown)


def on_post_build(*, config: Any) -> None:
    """Let the search take a query for words, and not for a language."""
    (worker,) = Path(config.site_dir, _WORKERS).glob("search.*.js")
    worker.write_text((_HERE / _WORDS).read_text() + worker.read_text())
