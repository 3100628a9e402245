"""What the C library calls the kernel's error numbers, in the languages in which logs are written."""

import errno
import os
import re

SENTENCES: dict[str, int] = {os.strerror(number).lower(): number for number in errno.errorcode}
# What the kernel's sentences are in other languages; the numbers beside them are the same everywhere.
SENTENCES |= {
    "kein speicherplatz mehr auf dem gerät verfügbar": errno.ENOSPC,
    "auf dem gerät ist kein speicherplatz mehr verfügbar": errno.ENOSPC,
    "kein speicherplatz mehr frei auf dem gerät": errno.ENOSPC,
    "der plattenplatz-kontingent wurde überschritten": errno.EDQUOT,
    "der zugewiesene plattenplatz (quota) ist überschritten": errno.EDQUOT,
    "datei oder verzeichnis nicht gefunden": errno.ENOENT,
    "keine berechtigung": errno.EACCES,
    "zu viele offene dateien": errno.EMFILE,
    "aucun espace disponible sur le périphérique": errno.ENOSPC,
    "aucun fichier ou dossier de ce type": errno.ENOENT,
    "permission non accordée": errno.EACCES,
    "no queda espacio en el dispositivo": errno.ENOSPC,
    "no existe el archivo o el directorio": errno.ENOENT,
    "permiso denegado": errno.EACCES,
    "设备上没有空间": errno.ENOSPC,
    "没有那个文件或目录": errno.ENOENT,
    "权限不够": errno.EACCES,
    "デバイスに空き領域がありません": errno.ENOSPC,
    "そのようなファイルやディレクトリはありません": errno.ENOENT,
}

# What can go wrong with a file: where such a sentence ends a message it is the cause, whatever raised it.
_OF_FILES = (
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EROFS),
    *(errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ENOTCONN),
    errno.ESHUTDOWN,
)
_AT_THE_END = re.compile(
    r"(?:^|[:,] |\bstrerror\W{1,3})(?P<text>"
    + "|".join(re.escape(words) for words, number in SENTENCES.items() if number in _OF_FILES)
    + r")(?: \(os error \d+\))?(?:: ?'?/[^ ]*)?\W*$",
    re.IGNORECASE,
)
# As HDF5 and others put it, and without the kernel's words.
_NUMBERED = re.compile(r"\berrno ?[=:]? ?(?P<number>\d{1,3})\b|\(os error (?P<rust>\d{1,3})\)")
_NOT_THERE = re.compile(
    r"(?:^|: )(?:the )?(?:parent |output |data )?(?:directory|folder|file|path):? \S+ (?:does not|doesn't) exist"
    r"|^\S*/\S+ (?:does not|doesn't) exist",
    re.IGNORECASE,
)


# As libraries put it in words of their own.
_IN_OTHER_WORDS = (
    (
        errno.ENOSPC,
        (
            r"\b(?:disk|device|drive|volume|file ?system|partition) (?:is |was )?full\b"
            r"|(?:not enough|insufficient|no|out of) (?:free |available )?(?:disk|storage) space"
        ),
    ),
    (
        errno.EDQUOT,
        r"(?:disk|storage|inode|file|user|group|project) quota\b.{0,20}exceed|exceed\w*.{0,20}(?:disk|storage|inode) quota",
    ),
    (errno.EROFS, r"read-?only (?:database|file ?system|volume|directory)"),
)
_SAID_OTHERWISE = tuple(
    (number, re.compile(words, re.IGNORECASE)) for number, words in _IN_OTHER_WORDS
)


def of_a_file(message: str) -> int:
    """Return the error number of what went wrong with a file, as the end of a message tells it; 0 if it tells none."""
    found = _AT_THE_END.search(message)
    if found is not None:
        return SENTENCES[found["text"].lower()]
    numbered = _NUMBERED.search(message)
    if numbered is not None:
        number = int(numbered["number"] or numbered["rust"])
        return number if number in _OF_FILES else 0
    for number, words in _SAID_OTHERWISE:
        if words.search(message):
            return number
    return errno.ENOENT if _NOT_THERE.search(message) else 0
