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
from collapipe.runs.failure import take_failure
from server_app.app import main


@pytest.mark.parametrize("resolved", [True, False])
def test_an_error_in_the_combination_of_options_is_reported(tmp_path: Path, resolved: bool) -> None:
    """The submitting command checked each option only separately, or it was Flower's command."""
    options = ["task=classification", "runtime=deployment", "runtime.federation=there"]
    options.append(f"hydra.run.dir={tmp_path}")
    given = {"settings": outline(options).text} if resolved else {"overrides": " ".join(options)}
    context = SimpleNamespace(run_config=given)
    level = logging.getLogger("flwr").level
    try:
        with pytest.raises(ConfigError) as raised:
            main(cast(Grid, None), cast(Context, context))
    finally:
        logging.getLogger("flwr").setLevel(level)
    failure = take_failure(tmp_path, "resume")
    assert (str(failure), failure.exit_status) == (str(raised.value), ConfigError.exit_status)
    assert "task=classification" in str(failure)
