"""`muster.toml`: which files are read, what they may say, and where each mistake is."""

import os
import re
from pathlib import Path

import pytest

from torchmuster.errors import ManyErrors, UsageError
from torchmuster.launcher.engines.schedulers import SCHEDULERS
from torchmuster.launcher.model.scheduler import SchedulerFacts
from torchmuster.launcher.spec.site import (
    BUILT_IN,
    SiteKeys,
    keys_of_kind,
    kinds_of,
    load_sites,
    site_hosts,
)

LSF = SchedulerFacts(name="lsf", module="lsf.dialect", install="LSF")
PAGE = Path(__file__).parents[4] / "docs" / "sites.md"
BLOCKS = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def load(tmp_path):
    """Return a function that loads these texts as the project's and the user's file."""
    project = tmp_path / "project"
    (project / "deep" / "down").mkdir(parents=True)
    (tmp_path / "config" / "muster").mkdir(parents=True)
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "config")}

    def call(text=None, user=None, **options):
        if text is not None:
            (project / "muster.toml").write_text(text)
        if user is not None:
            (tmp_path / "config/muster/config.toml").write_text(user)
        return load_sites(str(project / "deep" / "down"), environment, {**SCHEDULERS, **options})

    return call


def errors_of(load, text, user=None):
    with pytest.raises(ManyErrors) as caught:
        load(text, user)
    return caught.value.errors


def test_kinds_are_there_without_a_file(load):
    sites = load()
    assert list(sites.sites) == ["local", "slurm", "pbs", "kubernetes"]
    assert {site.origin for site in sites.sites.values()} == {BUILT_IN}
    assert (sites.files, sites.configured) == ((), ())


def test_a_removed_kind_says_what_to_use_instead(load):
    (error,) = errors_of(load, "[engines.old]\nkind = 'torque'\n")
    assert error.what.startswith("muster submits no jobs to Torque")
    assert "muster run --hosts" in error.fix
    with pytest.raises(UsageError, match="muster submits no jobs to Torque"):
        load("").get("torque")


def test_the_nearest_file_above_is_read(load, tmp_path):
    (tmp_path / "muster.toml").write_text("[engines.far]\nkind = 'slurm'\n")
    sites = load("[engines.near]\nkind = 'slurm'\n")
    assert [site.name for site in sites.configured] == ["near"]
    assert sites.get("near").origin == f"{tmp_path}/project/muster.toml:1:1"


def test_a_home_without_xdg_has_its_config_folder(tmp_path):
    (tmp_path / ".config/muster").mkdir(parents=True)
    (tmp_path / ".config/muster/config.toml").write_text("[engines.mine]\nkind = 'pbs'\n")
    for xdg in ("", "relative"):
        sites = load_sites("/", {"HOME": str(tmp_path), "XDG_CONFIG_HOME": xdg}, SCHEDULERS)
        assert sites.get("mine").kind == "pbs"


def test_the_project_is_over_the_user_key_by_key(load):
    user = (
        "[engines.gpu]\nkind = 'slurm'\npartition = 'a'\naccount = 'me'\n[defaults]\non = 'gpu'\n"
    )
    sites = load("[engines.gpu]\nqueue = 'b'\ntime = '90m'\n", user)
    site = sites.get("gpu")
    assert (site.queue_name, site.account, site.time) == ("b", "me", 5400.0)
    assert sites.default_on == "gpu"


def test_another_kind_takes_nothing_of_the_users_section(load):
    sites = load("[engines.x]\nkind = 'pbs'\n", "[engines.x]\nkind = 'slurm'\nqos = 'high'\n")
    assert (sites.get("x").kind, sites.get("x").qos) == ("pbs", None)


def test_a_section_may_be_named_as_its_kind(load):
    assert load("[engines.slurm]\npartition = 'gpu'\n").get("slurm").queue_name == "gpu"


def test_all_mistakes_of_both_files_come_at_once_in_their_order(load, tmp_path):
    text = """\
[engines.gpu]
kind = "slurm"
quque = "x"
nodes = "4:2"
  gpus_per_node = true
directives = ["--ok", "oops"]
[defaults]
on = "gup"
"""
    found = errors_of(load, text, "[engines.lab]\nkind = 'ssh'\n[engine.x]\n")
    file = f"{tmp_path}/project/muster.toml"
    assert [error.where for error in found[2:]] == [
        f"{file}:3:1 engines.gpu.quque",
        f"{file}:4:1 engines.gpu.nodes",
        f"{file}:5:3 engines.gpu.gpus_per_node",
        f"{file}:6:1 engines.gpu.directives",
        f"{file}:8:1 defaults.on",
    ]
    user_file = f"{tmp_path}/config/muster/config.toml"
    assert [error.where for error in found[:2]] == [
        f"{user_file}:1:1 engines.lab",
        f"{user_file}:3:1 engine",
    ]
    assert "has no hosts" in found[0].what
    assert found[1].fix == "did you mean `engines`?"
    assert found[2].fix == "did you mean `queue`?"
    assert found[6].fix == "did you mean `gpu`?"


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ("kind = 'slrum'", "no kind of engine `slrum`", "`slurm`"),
        ("kind = 7", "expected a text", None),
        ("", "`kind` is missing in engines.x", "kind ="),
        ("kind = 'slurm'\nwalltime = '1h'", "unknown key `walltime`", "`time`"),
        ("kind = 'slurm'\nproject = 'p'", "has no effect", "account"),
        ("kind = 'pbs'\nqos = 'p'", "has no effect", "queue"),
        ("kind = 'ssh'\nhosts = ['a']\npartition = 'p'", "has no effect", "a key of slurm"),
        ("kind = 'slurm'\npartition = 'p'\nqueue = 'q'", "mean the same", None),
        ("kind = 'slurm'\npartition = 'a b'", "can't be used in a job script", None),
        ("kind = 'slurm'\npartition = '-a'", "looks like an option", "directives"),
        ("kind = 'slurm'\ntime = 'soon'", "`soon` is not a valid time", "90m"),
        ("kind = 'slurm'\nsetup = 'module load x'", "expected a list", '["module load x"]'),
        ("kind = 'slurm'\nsetup = ['a\\nb']", None, None),
        ('kind = "slurm"\nsetup = ["a\\nb"]', "newline", "one line"),
        ("kind = 'slurm'\ndirectives = ['#PBS -q x']", "another scheduler", "#SBATCH"),
        ("kind = 'pbs'\nstart_with = ['pdsh']", "not one of", "`pbsdsh`"),
        ("kind = 'pbs'\nchunk = 'a=b'", "expected a table", None),
        ("kind = 'pbs'\nchunk = { 'a:b' = 'c' }", "can't be a key", None),
        ("kind = 'slurm'\nenvironment = { HF_TOKEN = 'x' }", "looks like a secret", "cat "),
        ("kind = 'slurm'\nenvironment = { 'a b' = 'x' }", "can't be a variable", None),
        ("kind = 'slurm'\nnodes = 0", "at least 1 node", None),
        ("kind = 'slurm'\ncpus_per_node = 0", "is not from 1", None),
        ("kind = 'ssh'", "has no hosts", "hosts ="),
        ("kind = 'ssh'\nhosts = ['a slot=4']", "`slot=4`", "`slots`"),
        ("kind = 'ssh'\nhosts = ['-oProxyCommand=x']", "is not a valid host", None),
        ("kind = 'ssh'\nhosts = ['a']\nport = 70000", "is not from 1", None),
    ],
)
def test_a_mistake_says_what_and_how_to_mend_it(load, line, what, fix):
    if what is None:  # a literal string holds no newline
        assert load(f"[engines.x]\n{line}\n").get("x").setup == ("a\\nb",)
        return
    (error,) = errors_of(load, f"[engines.x]\n{line}\n")
    assert what in error.what
    assert fix is None or fix in (error.fix or "")
    assert "muster.toml:" in error.where


@pytest.mark.parametrize("name", ["all", "'a b'", "'-x'", "'é'"])
def test_names_that_on_could_not_take(load, name):
    (error,) = errors_of(load, f"[engines.{name}]\nkind = 'slurm'\n")
    assert "can't be the name" in error.what


def test_the_name_of_one_kind_is_not_another(load):
    (error,) = errors_of(load, "[engines.pbs]\nkind = 'slurm'\n")
    assert "the name of another kind" in error.what


def test_what_is_no_toml_has_its_place(load, tmp_path):
    (error,) = errors_of(load, "[engines.x]\nkind = slurm\n")
    assert error.where == f"{tmp_path}/project/muster.toml:2:8"


def test_a_table_that_is_none(load):
    (error,) = errors_of(load, "engines = 3\n")
    assert error.what == "expected a table, found the number 3"


def test_a_kind_that_another_package_brings(load):
    sites = load("[engines.x]\nkind = 'lsf'\nqueue = 'q'\n", lsf=LSF)
    assert sites.get("x").is_batch


def test_an_unknown_name_has_a_near_miss_and_the_files(load):
    sites = load("[engines.gpu]\nkind = 'slurm'\n")
    with pytest.raises(UsageError, match="no engine `gpo`") as caught:
        sites.get("gpo")
    assert caught.value.fix == "did you mean `gpu`?"
    assert "project/muster.toml" in caught.value.why


def test_a_file_that_everybody_can_write_is_left_alone(load, tmp_path):
    path = tmp_path / "project/muster.toml"
    path.write_text("[engines.gpu]\nkind = 'slurm'\n")
    path.chmod(0o666)
    sites = load()
    assert sites.configured == ()
    assert sites.notes[0].startswith(f"{path} is not used: everybody can write to it")
    with pytest.raises(UsageError, match="there is no engine `gpu`") as caught:
        sites.get("gpu")
    assert caught.value.why == "the settings that were found are not used"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("mode", [0o1777, 0o755])
def test_a_file_of_another_user_is_used_only_when_the_user_has_named_it(
    load, tmp_path, monkeypatch, mode
):
    path = tmp_path / "project/muster.toml"
    path.write_text("[engines.gpu]\nkind = 'slurm'\n")
    os.chown(path, 12345, 12345)
    path.parent.chmod(mode)
    sites = load()
    assert sites.configured == ()
    assert (
        "is not used: it belongs to another user (uid 12345); read it, then: echo" in sites.notes[0]
    )

    trusted = Path(sites.notes[0].rpartition(" >> ")[2])
    trusted.parent.mkdir(parents=True, exist_ok=True)
    trusted.write_text(f"/elsewhere/muster.toml\n{path}\n")
    sites = load()
    assert [site.name for site in sites.configured] == ["gpu"]
    assert sites.notes == ()

    os.chown(trusted, 12345, 12345)  # a list that somebody else wrote names nothing
    assert load().configured == ()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link away")
def test_a_link_of_another_user_to_a_file_of_ours_is_left_alone(load, tmp_path):
    ours = tmp_path / "ours.toml"
    ours.write_text("[engines.gpu]\nkind = 'slurm'\n")
    path = tmp_path / "project/muster.toml"
    path.symlink_to(ours)
    assert load().configured != ()

    os.chown(path, 12345, 12345, follow_symlinks=False)
    sites = load()
    assert sites.configured == ()
    assert "is not used: the link belongs to another user" in sites.notes[0]


def test_a_folder_is_no_file(load, tmp_path):
    (tmp_path / "project/muster.toml").mkdir()
    (error,) = errors_of(load, None)
    assert error.where == f"{tmp_path}/project/muster.toml"


def test_hosts_come_from_the_list_or_from_a_file_beside_it(load, tmp_path):
    sites = load(
        "[engines.a]\nkind = 'ssh'\nhosts = ['n1 slots=4', 'me@n2', 'n1 slots=2']\n"
        "[engines.b]\nkind = 'ssh'\nhostfile = 'hosts'\n"
    )
    found = [(host.name, host.slots, host.user) for host in site_hosts(sites.get("a"))]
    assert found == [("n1", 6, None), ("n2", None, "me")]
    with pytest.raises(ManyErrors, match="can't be read"):
        site_hosts(sites.get("b"))
    (tmp_path / "project/hosts").write_text("n3 slots=8\n")
    assert site_hosts(sites.get("b"))[0].slots == 8


def test_every_key_belongs_to_a_kind():
    assert set(SiteKeys.model_fields) == set().union(
        *(keys_of_kind(kind, SCHEDULERS) for kind in kinds_of(SCHEDULERS))
    )


def test_the_page_has_every_key():
    missing = [
        key for key in SiteKeys.model_fields if not re.search(rf"\b{key}\b", PAGE.read_text())
    ]
    assert missing == []


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("]")[0].lstrip("["))
def test_each_example_of_the_page_is_right(load, block):
    assert load(block).configured


def test_the_page_has_its_examples():
    assert len(BLOCKS) >= 4
