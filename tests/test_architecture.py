"""Import rules: each import in each top-level package is checked, and an error names its line. A
text that names a module counts as an import, because a process or a later import may use it.

``optim`` imports only the schedules of ``pipeline``; ``pipeline`` never imports ``optim``. Only a
few modules import external frameworks. To change a rule, change the tables below in the same
commit.
"""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("collapipe", "optim", "pipeline", "client_app", "server_app", "reproduction")

# Modules of this repository that a file may import; the first matching path prefix counts.
OWN = {
    "collapipe/cli/": ROOMS,  # the command line starts all packages
    # a device's daemon loads it
    "collapipe/credentials/": (
        "collapipe.credentials",
        "collapipe.errors",
        "collapipe.process.files",
    ),
    "collapipe/inventory/planned.py": ("collapipe", "optim"),  # the planner's solutions
    "collapipe/inventory/planning.py": ("collapipe", "optim"),  # asks the planner
    "collapipe/run_report/": (  # draws plans by the planner's timeline, runs by their schedules
        "collapipe",
        "optim",
        "pipeline.schedule",
    ),
    "collapipe/": ("collapipe",),
    # simulates the schedules that run
    "optim/step.py": (
        "collapipe.errors",
        "collapipe.row_shares",
        "collapipe.state",
        "collapipe.step_law",
        "optim.jobs",
        "pipeline.schedule",
    ),
    "optim/": (
        "optim",
        "collapipe.errors",
        "collapipe.plan",
        "collapipe.report",  # a round's cost, which it computes
        "collapipe.state",
        "collapipe.step_law",
        "collapipe.validation",  # of a strategy's plan
    ),
    # a device's daemon, which checks its callers' certificates and keeps frozen weights
    "pipeline/devices/daemon/": (
        "pipeline.devices.block_form",
        "pipeline.devices.daemon",  # not pipeline.devices.control_unit
        "pipeline.devices.encoding",
        "pipeline.devices.fence",
        "pipeline.devices.hops",
        "pipeline.devices.messages",
        "pipeline.hop_codec",
        "pipeline.phase_timer",
        "pipeline.schedule",
        "pipeline.segment",
        "pipeline.stage",
        "collapipe.__version__",
        "collapipe.credentials",
        "collapipe.errors",
        "collapipe.models",
        "collapipe.plan",
        "collapipe.process",
        "collapipe.row_shares",
        "collapipe.tensors",
        "collapipe.wire",
    ),
    "pipeline/": (
        "pipeline",
        "collapipe.errors",
        "collapipe.models",
        "collapipe.plan",
        "collapipe.process",
        "collapipe.report",
        "collapipe.row_shares",
        "collapipe.sections",  # an optimiser's settings
        "collapipe.state",
        "collapipe.tensors",
        "collapipe.validation",  # of messages
        "collapipe.wire.compression.codec",
        "collapipe.wire.device_address",
        "collapipe.wire.frames",
        "collapipe.wire.parts",
        "collapipe.wire.streams",
    ),
    "reproduction/": (*ROOMS,),  # the paper's figures, which are not installed
    "client_app/": (
        "client_app",
        "pipeline",
        "collapipe",
        "optim.partition",
        "optim.problem",
        "optim.verified",
        "optim.step",
        "optim.sharing.exact",
        "optim.sharing.law",
    ),
    "server_app/": ("server_app", "optim", "collapipe"),
}

# Layers of ``collapipe``, lowest first: a module imports its own package and packages that are
# earlier in this list.
LAYERS = (
    "errors",
    "hub",
    "process",
    "validation",
    "own_packages",
    "seeds",
    "tensors",
    "step_law",
    "state",
    "row_shares",
    "plan",
    "report",
    "statistics",
    "formatting",
    "sections",
    "privacy",
    "text",
    "credentials",
    "secure_aggregation",
    "wire",
    "flower",
    "devices",
    "models",
    "data",
    "tasks",
    "config",
    "inventory",
    "runs",
    "audit",
    "owner_account",
    "owner_file",
    "owner",
    "deployment",
    "run_report",
    "cli",
    "__main__",
)

# Packages that Flower documents; any version may change the others.
PUBLISHED = ("app", "clientapp", "serverapp")

# Modules that only these files may import; the longest matching module name counts.
EDGES = {
    "click": ("collapipe/cli/",),
    "collapipe.cli": ("collapipe/cli/", "collapipe/__init__.py", "collapipe/__main__.py"),
    "collapipe.cli.app": ("collapipe/cli/", "collapipe/__main__.py", "reproduction/"),  # starts it
    "flwr": ("collapipe/flower/",),
    **{
        f"flwr.{published}": (
            "collapipe/flower/",
            "collapipe/wire/records.py",
            "client_app/answering.py",
            "client_app/app.py",
            "client_app/node.py",
            "server_app/",
        )
        for published in PUBLISHED
    },
    "flwr.app.message": ("collapipe/flower/",),  # not documented, in contrast to flwr.app.Message
    "hydra": (
        "collapipe/config/composing.py",
        "collapipe/config/overrides.py",
        "collapipe/config/own.py",
    ),
    "omegaconf": (
        "collapipe/config/composing.py",
        "collapipe/config/own.py",
        "collapipe/config/trust.py",
        "collapipe/runs/folder.py",
    ),
    "typer": ("collapipe/cli/",),
}

# Packages that may import only these libraries.
LIBRARIES = {
    "collapipe/credentials/": ("cryptography", "grpc"),
    "optim/": ("numpy", "scipy", "cvxpy", "pydantic"),
}


def test_every_layer_imports_downwards() -> None:
    found = [
        f"collapipe.{importer} imports collapipe.{imported}, which stands in no layer below it"
        for importer, imported in _edges("collapipe")
        if imported not in LAYERS[: LAYERS.index(importer)]
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_no_cycle_of_packages_or_files(room: str) -> None:
    for edges in (_edges(room), _file_edges(room)):
        graph: dict[str, set[str]] = {}
        for importer, imported in edges:
            graph.setdefault(importer, set()).add(imported)
        try:
            tuple(TopologicalSorter(graph).static_order())
        except CycleError as error:
            pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("room", ROOMS)
def test_a_package_imports_only_allowed_modules(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    found = [offence for file in files for offence in _offences(_name(file), file.read_text())]
    assert not found, "\n" + "\n".join(found)


def test_every_library_is_a_declared_dependency() -> None:
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    found = [text for file in files for text in _undeclared(_name(file), file.read_text())]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("collapipe/new.py", "import hydra"),
        ("collapipe/new.py", "from omegaconf import OmegaConf"),
        ("collapipe/new.py", "import typer"),
        ("collapipe/new.py", "from flwr.app import Message"),
        ("collapipe/new.py", "from collapipe.cli.run import run_job"),
        ("collapipe/new.py", "import server_app"),
        ("collapipe/models/new.py", "from pipeline import schedule"),
        ("collapipe/tasks/new.py", "from ..cli import run"),
        ("optim/new.py", "import torch"),
        ("optim/new.py", "from torch import Tensor"),
        ("optim/new.py", "from collapipe.config import Settings"),
        ("optim/new.py", "from collapipe import models"),
        ("optim/new.py", "from pipeline.schedule import gpipe"),
        ("pipeline/new.py", "from flwr.app import Message"),
        ("pipeline/new.py", "from optim.partition import even_partition"),
        ("pipeline/new.py", "import client_app.link as link"),
        ("pipeline/new.py", "from collapipe import wire"),
        ("client_app/new.py", "from optim.planner import Planner"),
        ("client_app/new.py", "from optim import planner"),
        ("client_app/new.py", "import server_app.decoding.decoder"),
        ("client_app/control_unit.py", "from flwr.app import Context"),
        ("server_app/new.py", "import pipeline.engine"),
        ("server_app/new.py", "from client_app.link import DecoderLink"),
        ("server_app/new.py", "from flwr.supercore.run import Run"),
        ("server_app/new.py", "from flwr import supercore"),
        ("server_app/new.py", "from flwr.cli import build"),
        ("server_app/new.py", "import flwr"),
        ("server_app/new.py", "from flwr.app.message import make_message"),
        ("collapipe/cli/new.py", "from flwr.app import Message"),
        ("server_app/new.py", "from collapipe.cli import run"),
    ],
)
@pytest.mark.parametrize(
    "frame", ["{}", "def later():\n    {}", "if TYPE_CHECKING:\n    {}"], ids=["top", "def", "if"]
)
def test_a_forbidden_import_is_found(file: str, source: str, frame: str) -> None:
    text = frame.format(source)
    (offence,) = _offences(file, text)
    assert offence.startswith(f"{file}:{len(text.splitlines())}: imports ")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("collapipe/new.py", "import importlib\nimportlib.import_module('optim.planner')"),
        ("pipeline/new.py", "\n__import__('flwr.app')"),
        ("optim/new.py", "from pkgutil import resolve_name\nresolve_name('torch:Tensor')"),
        ("collapipe/process/new.py", "\ncommand = [python, '-m', 'collapipe.cli.app']"),
        ("collapipe/deployment/new.py", "def started():\n return '-P', '-m', 'server_app.guard'"),
        ("pipeline/new.py", "\n_PROGRAM = 'client_app.app'"),
        ("pipeline/new.py", "\n_APP = 'client_app.app:app'"),
        ("collapipe/config/new.py", "\n_PACKAGE = 'optim'; _OTHER = 'optim.allocation'"),
    ],
)
def test_an_import_by_name_is_found(file: str, source: str) -> None:
    (offence,) = _offences(file, source)
    assert offence.startswith(f"{file}:2: imports ")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("collapipe/config/composing.py", "import hydra, omegaconf"),
        ("collapipe/cli/new.py", "import typer\nfrom server_app.app import app"),
        ("optim/new.py", "import math\nimport numpy as np\nfrom collapipe.plan import Span"),
        (
            "pipeline/new.py",
            "import torch\nfrom collapipe.wire import frames\nfrom . import schedule",
        ),
        ("client_app/new.py", "from optim.partition import even_partition"),
        ("collapipe/flower/new.py", "from flwr.supercore.run import Run"),
        ("server_app/new.py", "from flwr.app import Message"),
        ("server_app/new.py", "from flwr.serverapp.strategy import Result"),
    ],
)
def test_an_allowed_import_is_not_reported(file: str, source: str) -> None:
    assert [*_offences(file, source), *_undeclared(file, source)] == []


@pytest.mark.parametrize("source", ["import requests", "import pyarrow", "import tests.federated"])
def test_an_undeclared_library_is_found(source: str) -> None:
    (offence,) = _undeclared("collapipe/new.py", source)
    assert offence.startswith("collapipe/new.py:1: ")


def _offences(file: str, source: str) -> list[str]:
    """Return a line ``FILE:LINE: imports MODULE …`` for each forbidden import."""
    imports = _imports(file, source)
    return [
        f"{file}:{line}: imports {module}; {why}"
        for line, module in imports
        if (why := _why_not(file, module))
    ]


def _why_not(file: str, module: str) -> str | None:
    """Return the rule that ``module`` breaks in ``file``; None if the import is allowed."""
    top = module.split(".")[0]
    if top in ROOMS:
        prefix, allowed = next((p, own) for p, own in OWN.items() if file.startswith(p))
        if not any(_within(module, own) for own in allowed):
            return f"{prefix} may import {', '.join(allowed)}"
    elif top not in sys.stdlib_module_names:
        for prefix, libraries in LIBRARIES.items():
            if file.startswith(prefix) and top not in libraries:
                return f"{prefix} may import {', '.join(libraries)}"
    edges = [edge for edge in EDGES if _within(module, edge)]
    if edges and not file.startswith(EDGES[max(edges, key=len)]):
        return f"only {', '.join(EDGES[max(edges, key=len)])} may"
    return None


def _edges(room: str) -> set[tuple[str, str]]:
    """Return imports between direct children (packages or files) of a package: importer,
    imported."""
    pairs = {tuple(name.split(".")[1] for name in edge) for edge in _file_edges(room)}
    return {(importer, imported) for importer, imported in pairs if importer != imported}


def _file_edges(room: str) -> set[tuple[str, str]]:
    """Return imports between a package's files, by dotted names; ``__init__`` counts as a file."""
    files = {_dotted(file): file for file in sorted((ROOT / room).rglob("*.py"))}
    del files[room]
    return {
        (name, found)
        for name, file in files.items()
        for _, module in _imports(_name(file), file.read_text())
        if (found := _file_of(module, files)) is not None and found != name
    }


def _file_of(module: str, files: Mapping[str, Path]) -> str | None:
    """Return the file that an import of ``module`` reads: ``a.b.c`` may be a name in ``a.b``."""
    return next((m for m in (module, module.rpartition(".")[0]) if m in files), None)


def _dotted(file: Path) -> str:
    return _name(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _undeclared(file: str, source: str) -> list[str]:
    """Return a line ``FILE:LINE: …`` for each library that pyproject.toml does not list."""
    known = {*ROOMS, *sys.stdlib_module_names}
    return [
        f"{file}:{line}: {module} belongs to no dependency in pyproject.toml"
        for line, module in _imports(file, source)
        if module.split(".")[0] not in known and not _providers(module) & _dependencies()
    ]


@functools.cache  # several tests read each file
def _imports(file: str, source: str) -> Sequence[tuple[int, str]]:
    """Return line and dotted name of each import, ``a.b`` for ``from a import b``."""
    return [*dict.fromkeys(_found(file, source))]  # a call's argument is found twice


def _found(file: str, source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source, file)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                package = file.split("/")[:-level] if level else []
                base = ".".join([*package, *([module] if module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module")
                | ast.Name(id="__import__" | "resolve_name"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name.replace(":", ".")
            case ast.Constant(value=str(name)) if _is_module(name.partition(":")[0]):
                yield node.lineno, name.replace(":", ".")


def _is_module(name: str) -> bool:
    """Return whether a text such as ``a.b`` names a module of this repository. A package's name
    without a dot does not count: it is also a word."""
    file = ROOT / name.replace(".", "/")
    dotted = re.fullmatch(r"\w+(\.\w+)+", name) is not None
    return dotted and (file.with_suffix(".py").exists() or (file / "__init__.py").exists())


def _within(module: str, prefix: str) -> bool:
    return f"{module}.".startswith(f"{prefix}.")


def _name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def _providers(module: str) -> set[str]:
    """Return the installed distributions that may provide the module."""
    return {_normal(name) for name in _distributions().get(module.split(".")[0], ())}


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())


@functools.cache
def _dependencies() -> frozenset[str]:
    """Return the distributions that users install, without the extra ``dev``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {k: v for k, v in project["optional-dependencies"].items() if k != "dev"}
    requirements = [*project["dependencies"], *(r for each in extras.values() for r in each)]
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return frozenset(_normal(name.group()) for name in names if name)


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
