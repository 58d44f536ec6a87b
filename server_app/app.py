"""The ServerApp: reads the configuration and writes a trained model to the run's folder."""

import logging
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from collapipe import config
from collapipe.config import Settings
from collapipe.errors import CollaPipeError, ConfigError, printable
from collapipe.flower.prompt_grid import make_prompt
from collapipe.runs.failure import write_failure
from server_app.records.summary import budget_text
from server_app.training import train

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a whole training; Flower calls this."""
    options = config.received(context.run_config)
    try:
        settings = config.load_text(options.text)
        _train(grid, settings, str(context.run_config.get("resume", "")) or None)
    except CollaPipeError as error:
        passed_on = write_failure(Path(options.run_dir), error)
        # The command that waits for the run prints a failure and omits lines of errors.
        print("error:" if passed_on else "the run failed:", printable(str(error)), flush=True)
        logging.getLogger("flwr").setLevel(logging.CRITICAL)  # Flower would print a traceback
        raise


def _train(grid: Grid, settings: Settings, resume: str | None) -> None:
    for option, path in settings.data.paths().items():
        if not path.is_absolute():  # Flower's processes work in a folder of their own
            raise ConfigError(
                f"data.{option}={path}: give an absolute path; the apps run in {Path.cwd()}"
            )
    # Errors in these options must be raised before the run's folder exists.
    _ = settings.planner, settings.server_device, budget_text(settings.privacy)
    train(make_prompt(grid), settings, resume)
