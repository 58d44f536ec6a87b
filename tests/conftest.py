"""What all tests share."""

import gc
import logging
import os
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import settings
from thorough import EXAMPLES, THOROUGH_EXAMPLES

gc.disable()  # until all is imported: it would look at ever more modules
torch.set_num_threads(1)  # tiny tensors gain nothing from threads, and waiting for them costs much
# Property tests do not depend on chance, nor on how busy the machine is.
steady = settings(derandomize=True, database=None, deadline=None, max_examples=EXAMPLES)
settings.register_profile("steady", steady)
settings.register_profile("thorough", steady, max_examples=THOROUGH_EXAMPLES)
settings.load_profile("steady")

# Set where the real data are present: then a test that is skipped is a test that was forgotten.
NO_SKIPS = os.environ.get("COLLAPIPE_REQUIRE_DATA") == "1"
LONG = ("test_deployment", "test_simulation", "test_killed", "test_failures", "test_command")
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those of many minutes, and further cases, only where they are asked for; the longest first,
    so that none is waited for at the end."""
    for marker in ("faults", "thorough"):
        if marker not in config.getoption("markexpr"):
            left_out = [item for item in items if item.get_closest_marker(marker)]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]
    here = Path(__file__).parent  # tests of whole runs, which take longer than those of a module
    items.sort(key=lambda item: (item.path.stem not in LONG, item.path.parent != here))


def pytest_collection_finish() -> None:
    """Modules and tests stay: no search for garbage needs to look at them. Of what tests leave
    little is garbage that only a search finds, so that a rare one is enough."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
    # To a logger that passes nothing on, pytest adds handlers of its own, six times a test.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True  # to "torch"


def pytest_sessionfinish() -> None:
    """pytest will look for garbage five times more."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test's report, once pytest has made it."""
    return _judged((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file's report, which a skip of the whole file ends in."""
    return _judged((yield))


def _judged(report: Report) -> Report:
    """The report, failed where it was skipped and nothing may be."""
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped although COLLAPIPE_REQUIRE_DATA=1: {why}"
    return report


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """What a test draws does not depend on the tests before it."""
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        torch.manual_seed(0)
    else:  # torch would queue a call with a traceback for each kind of accelerator
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of folders; most tests make none."""
    folder = tmp_path_factory.mktemp("caches")
    return map(folder.joinpath, map(str, count()))


@pytest.fixture(autouse=True)
def _own_cache(_caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights that tests keep are not among the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(_caches)))
