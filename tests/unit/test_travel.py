"""torchmuster as an archive: named by content, the same everywhere, and nothing of this machine in it."""

import ast
import io
import zipfile
from pathlib import Path

from torchmuster.core import plugs, proc
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.node.remote import loader as remote_loader

PROGRAMS = {name: what.partition(":")[0] for name, what in plugs.table("programs").items()}

FILES = [("a.py", b"1"), ("b/c.py", b"2")]


def test_same_content_gives_the_same_bytes():
    assert code_copy.make_archive(FILES) == code_copy.make_archive(FILES)


def test_hash_tells_names_and_contents_apart():
    hashes = {
        code_copy.content_hash(files)
        for files in (
            FILES,
            [("a.py", b"12"), ("b/c.py", b"")],
            [("a.py1", b""), ("b/c.py", b"2")],
            FILES[:1],
        )
    }
    assert len(hashes) == 4


def test_loader_counts_as_we_do():
    files = code_copy.package_files(proc.PACKAGE_FOLDER)
    assert remote_loader.content_hash(files) == code_copy.content_hash(files)
    assert sorted(remote_loader.tree_files(proc.PACKAGE_FOLDER)) == files


def imports_of(path, *, at_its_top=False):
    """Return what a module imports of torchmuster: in functions too, unless only `at_its_top`."""
    found = set()

    def look(body):
        for node in body:
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                look(node.orelse)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchmuster"):
                found.update({node.module, *(f"{node.module}.{one.name}" for one in node.names)})
            elif isinstance(node, ast.Import):
                found.update(one.name for one in node.names)
            elif not at_its_top or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                look(ast.iter_child_nodes(node))

    look(ast.parse(path.read_text()).body)
    return found


def reached_from(names, *, at_its_top=False):
    """Return the modules of the package that modules import, with what those import."""
    root = Path(proc.PACKAGE_FOLDER)
    paths = {
        ".".join(p.relative_to(root.parent).with_suffix("").parts): p for p in root.rglob("*.py")
    }
    reached, waiting = set(), [name for name in paths if name.startswith(names)]
    while waiting:
        name = waiting.pop()
        if name in paths and name not in reached:
            reached.add(name)
            waiting += imports_of(paths[name], at_its_top=at_its_top)
    return {str(paths[name].relative_to(root)) for name in reached}


def test_what_nodes_import_travels():
    owners = tuple(f"torchmuster.{module}" for module in PROGRAMS.values())
    parts = (
        "torchmuster.core.programs",
        "torchmuster.core.node",
        "torchmuster.core.head",
        "torchmuster.train",
    )
    of_nodes = reached_from((*owners, *parts, "torchmuster.workflow.data"))
    of_scripts = reached_from(("torchmuster.launcher.api",), at_its_top=True)
    assert sorted(name for name in of_nodes | of_scripts if not code_copy.is_sent(name)) == []


def test_what_travels_is_there_and_what_no_node_needs_is_not_on_the_list():
    root = Path(proc.PACKAGE_FOLDER)
    assert [name for name in code_copy.travels() if not (root / name).exists()] == []
    assert set(code_copy.travels()) == set(remote_loader.TRAVELS)
    of_no_node = ("core/cli/run.py", "diagnose/lint/", "diagnose/plan/", "gpucheck/", "report/")
    names = [name for name, _ in code_copy.package_files(str(root))]
    assert [
        n for n in names if n.startswith(of_no_node) and not n.endswith(("__init__.py", "plug.py"))
    ] == []


def test_compiled_files_do_not_change_the_hash(tmp_path):
    (tmp_path / "a.py").write_text("1")
    before = code_copy.content_hash(code_copy.package_files(str(tmp_path)))
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"compiled")
    assert code_copy.content_hash(code_copy.package_files(str(tmp_path))) == before


def test_archive_is_made_once_and_a_damaged_one_again(tmp_path):
    sha = code_copy.content_hash(FILES)
    data = code_copy.cached_archive(str(tmp_path), FILES, sha)
    (kept,) = tmp_path.iterdir()
    assert kept.name == f"torchmuster-{sha}.zip"
    kept.write_bytes(b"damaged")
    assert code_copy.cached_archive(str(tmp_path), FILES, sha) == data
    assert kept.read_bytes() == data


def test_package_holds_text_only_so_it_is_right_for_every_processor():
    """x86_64 and aarch64 differ in machine code; there is none."""
    files = code_copy.package_files(proc.PACKAGE_FOLDER)
    data = code_copy.make_archive(files)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        for name in names:
            archive.read(name).decode()  # text
    assert {name.rpartition(".")[2] for name in names} <= {"py", "pyi", "typed", "txt", "tsv"}
    assert "launcher/node/remote/main.py" in names
