"""What ends the ServerApp is told to the command that submitted the run."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from flwr.app import Context
from flwr.serverapp import Grid

from collapipe.errors import ConfigError
from collapipe.runs.failure import take_failure
from server_app.app import main


def test_options_that_do_not_fit_together_are_told(tmp_path: Path) -> None:
    """That command has checked each by itself alone."""
    overrides = f"task=classification runtime=deployment hydra.run.dir={tmp_path}"
    context = SimpleNamespace(run_config={"overrides": f"{overrides} runtime.federation=there"})
    level = logging.getLogger("flwr").level
    try:
        with pytest.raises(ConfigError) as raised:
            main(cast(Grid, None), cast(Context, context))
    finally:
        logging.getLogger("flwr").setLevel(level)
    told = take_failure(tmp_path, "resume")
    assert (str(told), told.exit_status) == (str(raised.value), ConfigError.exit_status)
    assert "task=classification" in str(told)
