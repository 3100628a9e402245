"""What `pip install` leaves of a package with entry points, without a network."""

import tomllib


def install_metadata(project_file, site):
    """Write the metadata of a project into a folder that is to be on the path."""
    project = tomllib.loads(project_file.read_text())["project"]
    name = project["name"].replace("-", "_")
    metadata = site / f"{name}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return project
