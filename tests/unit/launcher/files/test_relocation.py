"""New places in what was unpacked, as conda writes them.

How conda does it is read in conda's own code and in that of conda-pack: `conda/core/portability.py` (`binary_replace`: the new prefix in place of
the old one, then the rest of the string up to its NUL, then as many NULs as it is shorter), and records `conda-meta/NAME.json` with
`paths_data.paths[]`, of which those with `prefix_placeholder` hold the prefix, `file_mode` saying `text` or `binary`.
"""

import json
import os

import pytest

from torchmuster.launcher.files.environment import conda_records, in_binary, relocate

PLACEHOLDER = b"/opt/anaconda1anaconda2anaconda3" + b"/placehold" * 22 + b"abc"
INSTALLED = b"/home/me/conda/envs/train"
PLACE = b"/scratch/muster-environments-1000/0123456789abcdef/env"


def as_conda(data, old, new):
    """Install as conda does: of each string up to its NUL, what it gets shorter is filled behind it."""
    found = []
    for string in data.split(b"\0"):
        shorter = string.count(old) * (len(old) - len(new))
        found.append(string.replace(old, new) + b"\0" * shorter)
    return b"\0".join(found)


BUILT = (
    b"\x7fELF\0\0"
    + PLACEHOLDER
    + b"/lib/python3.11\0\0\0after\0"
    + (PLACEHOLDER + b"/lib:" + PLACEHOLDER + b"/lib64\0next\0")
    + b"$ORIGIN/../lib\0end"
)


def test_a_longer_place_fits_into_the_room_that_conda_has_left():
    installed = as_conda(BUILT, PLACEHOLDER, INSTALLED)
    assert len(installed) == len(BUILT)
    moved = in_binary(installed, INSTALLED, PLACE, len(PLACEHOLDER), "lib/x.so")
    assert moved == as_conda(BUILT, PLACEHOLDER, PLACE)


def test_a_shorter_place_is_filled_with_nuls():
    installed = as_conda(BUILT, PLACEHOLDER, INSTALLED)
    moved = in_binary(installed, INSTALLED, b"/s/env", len(PLACEHOLDER), "lib/x.so")
    assert moved == as_conda(BUILT, PLACEHOLDER, b"/s/env")


def test_a_place_that_is_longer_than_the_room_is_refused():
    installed = as_conda(BUILT, PLACEHOLDER, INSTALLED)
    with pytest.raises(ValueError, match=r"lib/x.so has room for 255"):
        in_binary(installed, INSTALLED, b"/" + b"x" * 255, 255, "lib/x.so")


def test_a_string_that_conda_has_not_written_is_not_touched():
    data = b"\x7fELF\0" + INSTALLED + b"/lib\0" + b"data\0"  # no NULs behind it
    with pytest.raises(ValueError, match="another string than conda"):
        in_binary(data, INSTALLED, PLACE, len(PLACEHOLDER), "lib/x.so")


def record(prefix, *entries):
    meta = prefix / "conda-meta"
    meta.mkdir(parents=True, exist_ok=True)
    name = f"package{len(os.listdir(meta))}-1.0-0.json"
    (meta / name).write_text(json.dumps({"paths_data": {"paths_version": 1, "paths": entries}}))


def entry(path, mode):
    placeholder = PLACEHOLDER.decode()
    return {
        "_path": path,
        "path_type": "hardlink",
        "prefix_placeholder": placeholder,
        "file_mode": mode,
    }


def test_conda_s_records_say_which_files_hold_the_prefix(tmp_path):
    plain = {"_path": "lib/plain.txt", "path_type": "hardlink", "sha256": "00"}
    record(tmp_path, entry("bin/tool", "text"), entry("lib/x.so", "binary"), plain)
    record(tmp_path, entry("share/settings", "text"))
    (tmp_path / "conda-meta" / "history").write_text("==> 2026 <==\n")
    (tmp_path / "conda-meta" / "broken.json").write_text("{")
    (tmp_path / "conda-meta" / "old.json").write_text("{}")
    texts, binaries = conda_records(str(tmp_path))
    assert texts == {"bin/tool", "share/settings"}
    assert binaries == {"lib/x.so": len(PLACEHOLDER)}


def noted(**given):
    usual = {"links": {}, "texts": [], "binaries": {}, "moves": {INSTALLED.decode(): "env"}}
    return {**usual, **given}


def test_texts_and_binaries_name_the_new_place(tmp_path):
    (tmp_path / "env").mkdir()
    text, binary = tmp_path / "env" / "tool", tmp_path / "env" / "x.so"
    text.write_bytes(b"#!" + INSTALLED + b"/bin/python\n" + INSTALLED + b"-other\n")
    text.chmod(0o700)
    binary.write_bytes(as_conda(BUILT, PLACEHOLDER, INSTALLED))
    place = PLACE.decode().removesuffix("/env")
    notes = noted(texts=["env/tool"], binaries={"env/x.so": len(PLACEHOLDER)})
    relocate(str(tmp_path), place, notes)
    assert text.read_bytes() == b"#!" + PLACE + b"/bin/python\n" + INSTALLED + b"-other\n"
    assert os.access(text, os.X_OK)
    assert binary.read_bytes() == as_conda(BUILT, PLACEHOLDER, PLACE)


@pytest.mark.parametrize("key", ["texts", "binaries", "links"])
def test_what_is_noted_of_files_outside_is_refused(tmp_path, key):
    for name in ("../x", "/etc/x", "a/../../x"):
        value = [name] if key == "texts" else {name: 1}
        with pytest.raises(ValueError, match="leaves its folder"):
            relocate(str(tmp_path), "/place", noted(**{key: value}))
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(outside)
    value = ["link/x"] if key == "texts" else {"link/x": 1}
    with pytest.raises(ValueError, match="through a link"):
        relocate(str(tmp_path / "root"), "/place", noted(**{key: value}))
