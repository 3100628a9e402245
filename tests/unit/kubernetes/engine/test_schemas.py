"""Whole manifests: word for word, and as the published schemas of every supported version of Kubernetes take them."""

import difflib
import json

import pytest
import yaml

from kit import missing
from unit.kubernetes.engine.site_jobs import JOBS, manifest_of

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
# Its field came with 1.37; `docs/kubernetes.md` says so.
SINCE = {"native": "1.37"}


def text_of(name):
    objects = json.loads(manifest_of(name))["items"]
    return "---\n".join(yaml.safe_dump(one, sort_keys=False, width=110) for one in objects)


@pytest.mark.parametrize("name", JOBS)
def test_a_manifest_is_this_and_others_differ_from_it_in_these_lines(name, golden):
    text = text_of(name)
    if name not in ("default", "kinds"):  # a JobSet has nothing in the same place
        default = text_of("default").splitlines(keepends=True)
        changes = difflib.unified_diff(default, text.splitlines(keepends=True), n=1)
        # Places as numbers would change with every line above them.
        text = "".join("@@\n" if line.startswith("@@") else line for line in changes)
    golden("kubernetes_manifests.txt", name, text)


def schemas():
    try:
        import kubernetes_validate
    except ImportError:
        missing.stop("kubernetes-validate is not installed")
    return kubernetes_validate


def in_schemas(objects):
    """Yield what Kubernetes publishes schemas of: of a JobSet the Jobs that it makes."""
    for one in objects:
        if one["kind"] != "JobSet":
            yield one
            continue
        for kind in one["spec"]["replicatedJobs"]:
            yield {"apiVersion": "batch/v1", "kind": "Job", **kind["template"]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", JOBS)
def test_every_version_takes_the_manifest(name, version):
    validate = schemas().validate
    for one in in_schemas(json.loads(manifest_of(name))["items"]):
        if one["kind"] == "PodGroup":
            continue  # of Volcano, which publishes its own
        if one["kind"] == "Job" and version < SINCE.get(name, ""):
            with pytest.raises(schemas().ValidationError):
                validate(one, version, strict=True)
        else:
            assert validate(one, version, strict=True) == version


def test_no_published_version_is_left_out():
    published = {schemas().utils.major_minor(v) for v in schemas().utils.all_versions()}
    assert {v for v in published if v >= VERSIONS[0]} == set(VERSIONS)
