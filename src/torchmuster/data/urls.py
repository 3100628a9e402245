"""Which place a URL means: a folder on a disk or a prefix of an object store.

Credentials are the business of the stores' own libraries: their environment variables and files.
"""

import difflib
import importlib.util
import os
import re

from torchmuster.data.faults import DataError
from torchmuster.data.place import LocalPlace, Store, StorePlace

# Scheme: fsspec's protocol, the module that implements it, what to install.
_STORES = {
    "s3": ("s3", "s3fs", "s3fs"),
    "gs": ("gs", "gcsfs", "gcsfs"),
    "azure": ("abfs", "adlfs", "adlfs"),
    "abfs": ("abfs", "adlfs", "adlfs"),
    "memory": ("memory", "fsspec", "fsspec"),
}
_UNSUPPORTED = ("swift", "tos")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def open_place(url: str) -> Store:
    """Return the place at a URL or a plain path; nothing is made or read there yet.

    Raises:
        DataError: No such scheme, or the package for it is not installed.
    """
    if not url or "\0" in url:
        raise DataError("a URL or a path is needed, and this is empty", where=repr(url))
    match = _SCHEME.fullmatch(url)
    if match is None:
        return LocalPlace(os.path.expanduser(url))
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        if not rest.startswith("/"):
            raise DataError(
                "a file:// URL holds an absolute path", where=url, fix=f"file:///{rest}"
            )
        return LocalPlace(rest)
    if scheme not in _STORES:
        raise _unknown(scheme, url)
    return _open_store(scheme, rest, url)


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, `file` for a plain path."""
    match = _SCHEME.fullmatch(url)
    return match[1].lower() if match else "file"


def join(url: str, name: str) -> str:
    """Return the URL of something below a URL."""
    return f"{url.rstrip('/')}/{name}"


def _unknown(scheme: str, url: str) -> DataError:
    if scheme in _UNSUPPORTED:
        return DataError(
            f"{scheme}:// can't be reached: fsspec has no file system for it",
            where=url,
            fix="if the store has an S3-compatible endpoint: use s3:// and set AWS_ENDPOINT_URL",
        )
    near = difflib.get_close_matches(scheme, [*_STORES, "file"], n=1, cutoff=0.5)
    known = "s3://, gs://, azure://, abfs://, file:// and plain paths are known"
    what = f"`{scheme}://` is not a kind of URL that can be reached"
    return DataError(
        what, where=url, why=known, fix=f"did you mean `{near[0]}://`?" if near else None
    )


def _open_store(scheme: str, rest: str, url: str) -> Store:
    protocol, module, package = _STORES[scheme]
    if importlib.util.find_spec("fsspec") is None or importlib.util.find_spec(module) is None:
        fix = f"pip install {package}"
        raise DataError(f"{scheme}:// needs the package {package}", where=url, fix=fix)
    import fsspec

    path = rest.strip("/")
    if not path and scheme != "memory":
        raise DataError("the URL names no bucket", where=url, fix=f"{scheme}://BUCKET/FOLDER")
    options: dict[str, object] = {}
    if scheme in ("s3", "gs"):
        options["use_listings_cache"] = False  # others write there too
    if scheme == "azure":
        account, _, path = path.partition("/")
        if not path:
            fix = "azure://ACCOUNT/CONTAINER/FOLDER"
            raise DataError("the URL names no container", where=url, fix=fix)
        options["account_name"] = account
    try:
        filesystem = fsspec.filesystem(protocol, **options)
    except (ImportError, ValueError) as error:
        raise DataError("the store can't be opened", where=url, why=str(error)) from error
    root = f"/{path}" if scheme == "memory" else path
    return StorePlace(url.rstrip("/"), filesystem, root.rstrip("/"))
