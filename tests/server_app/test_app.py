"""The ServerApp reports the error that ends it to the command that submitted the run."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from flwr.app import Context
from flwr.serverapp import Grid

from collapipe.config import outline
from collapipe.errors import ConfigError
from collapipe.flower import commands
from collapipe.runs.failure import take_failure
from server_app.app import main


def fails(run_dir: Path, resolved: bool) -> ConfigError:
    """Run the app with options that do not fit together, and return its error."""
    options = ["task=classification", "runtime=deployment", "runtime.federation=there"]
    options.append(f"hydra.run.dir={run_dir}")
    given = {"settings": outline(options).text} if resolved else {"overrides": " ".join(options)}
    context = SimpleNamespace(run_config=given)
    level = logging.getLogger("flwr").level
    try:
        with pytest.raises(ConfigError, match="task=classification") as raised:
            main(cast(Grid, None), cast(Context, context))
    finally:
        logging.getLogger("flwr").setLevel(level)
    return raised.value


@pytest.mark.parametrize("resolved", [True, False])
def test_an_error_in_the_combination_of_options_is_reported(tmp_path: Path, resolved: bool) -> None:
    """The submitting command checked each option only separately, or it was Flower's command."""
    error = fails(tmp_path, resolved)
    failure = take_failure(tmp_path, "resume")
    assert (str(failure), failure.exit_status) == (str(error), ConfigError.exit_status)


def test_an_error_that_cannot_be_passed_on_is_in_the_output_that_the_command_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = fails(tmp_path / "absent", resolved=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert str(error) in line and not line.encode().startswith(commands._NOT_SHOWN)
