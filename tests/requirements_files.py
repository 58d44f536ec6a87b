"""Installations of CollaPipe with some of its extras, linked from the packages installed here."""

import tomllib
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def required(*extras: str) -> list[Requirement]:
    """Return CollaPipe's requirements with these extras, according to pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    found = [*map(Requirement, lines)]
    nested = [extra for each in found if each.name == "collapipe" for extra in each.extras]
    others = [each for each in found if each.name != "collapipe"]
    return others + (required(*nested) if nested else [])


def installed(extras: Sequence[str], site: Path) -> Path:
    """Make a folder of the packages that pip would install with these extras, and CollaPipe's
    metadata."""
    site.mkdir(parents=True, exist_ok=True)
    for name in closure(required(*extras)):
        _link(name, site, whole=True)
    _link("collapipe", site, whole=False)  # its version
    return site


def closure(requirements: Iterable[Requirement]) -> set[str]:
    """Return the distributions and everything that they require on this machine."""
    found, left = dict[str, set[str]](), list(requirements)
    while left:
        each = left.pop()
        name, extras = canonicalize_name(each.name), {"", *each.extras}
        if extras <= found.get(name, set()):
            continue
        found.setdefault(name, set()).update(extras)
        for other in map(Requirement, distribution(name).requires or ()):
            if other.marker is None or any(other.marker.evaluate({"extra": e}) for e in extras):
                left.append(other)
    return {*found}


def _link(name: str, site: Path, whole: bool) -> None:
    try:
        files = distribution(name).files or ()
    except PackageNotFoundError:  # a bundle of CollaPipe has no metadata
        return
    for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        target = Path(str(distribution(name).locate_file(top))).resolve()
        if (whole or top.endswith(".dist-info")) and not (site / top).exists():
            (site / top).symlink_to(target)
