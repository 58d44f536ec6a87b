"""Settings and fixtures of all tests."""

import functools
import gc
import io
import logging
import os
import pickle
import sys
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import settings
from thorough import EXAMPLES, THOROUGH_EXAMPLES

gc.disable()  # imports would make each garbage collection slower
torch.set_num_threads(1)  # with tiny tensors, threads cost more than they save
# Property tests depend neither on random choices nor on the machine's load.
steady = settings(derandomize=True, database=None, deadline=None, max_examples=EXAMPLES)
settings.register_profile("steady", steady)
settings.register_profile("thorough", steady, max_examples=THOROUGH_EXAMPLES)
settings.load_profile("steady")

# Set if the real data are present: then no test may be skipped.
NO_SKIPS = os.environ.get("COLLAPIPE_REQUIRE_DATA") == "1"
LONG = ("test_deployment", "test_simulation", "test_killed", "test_failures", "test_command")
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``faults`` or ``thorough`` unless ``-m`` names the marker; run the
    longest tests first, so that no long test remains for the end."""
    for marker in ("faults", "thorough"):
        if marker not in config.getoption("markexpr"):
            left_out = {item for item in items if item.get_closest_marker(marker)}
            config.hook.pytest_deselected(items=[*left_out])
            items[:] = [item for item in items if item not in left_out]
    here = Path(__file__).parent  # tests of whole runs take longer than a module's tests
    items.sort(key=lambda item: (item.path.stem not in LONG, item.path.parent != here))


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection, and collect rarely: tests leave few
    reference cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
    # pytest adds its handlers to each logger that does not propagate, six times per test.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True  # to "torch"
    if "hydra" in sys.modules:
        parse_options_once()


def parse_options_once() -> None:
    """Let ``OmegaConf.load`` parse each text of ``conf/`` and of Hydra's own options once: Hydra
    loads 25 files for each composition, which takes almost half of its time."""
    import hydra
    from omegaconf import OmegaConf

    load = OmegaConf.load
    folders = str(Path(__file__).parents[1] / "conf"), str(Path(hydra.__file__).parent)

    @functools.cache
    def parsed(text: str) -> bytes:
        return pickle.dumps(load(io.StringIO(text)))

    def load_once(file: Any) -> Any:
        known = str(getattr(file, "name", "")).startswith(folders)
        return pickle.loads(parsed(file.read())) if known else load(file)

    OmegaConf.load = staticmethod(load_once)  # type: ignore[assignment]


def pytest_sessionfinish() -> None:
    """Exclude all objects from the five garbage collections with which pytest ends."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a skipped test as failed if no test may be skipped."""
    return _judged((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Report a skipped file as failed if no test may be skipped."""
    return _judged((yield))


def _judged(report: Report) -> Report:
    """Return the report; a skip becomes a failure if ``NO_SKIPS`` is set."""
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped although COLLAPIPE_REQUIRE_DATA=1: {why}"
    return report


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Seed torch, so that a test's random numbers do not depend on earlier tests."""
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed would queue a call with a traceback per accelerator type
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return paths of folders that are not created: most tests need no folder."""
    folder = tmp_path_factory.mktemp("caches")
    return map(folder.joinpath, map(str, count()))


@pytest.fixture(autouse=True)
def _own_cache(_caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own cache, so that no test writes frozen weights to the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(_caches)))
