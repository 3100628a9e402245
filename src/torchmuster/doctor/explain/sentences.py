"""What the C library calls the kernel's error numbers, in the languages in which logs are written."""

import errno
import os

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
