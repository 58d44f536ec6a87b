"""The ServerApp: configuration in, a trained model in the run's folder."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from collapipe import config
from server_app.training import train

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a whole training, as Flower calls it."""
    train(grid, config.load(context.run_config))
