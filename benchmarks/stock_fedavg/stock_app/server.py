"""FedAvg as it comes, with the time at which each round ends."""

import json
import shlex
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    rounds, payload, output = shlex.split(str(context.run_config["overrides"]))
    ends: list[float] = []

    def note(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        ends.append(time.perf_counter())
        return None

    arrays = ArrayRecord({"weights": Array(np.zeros(int(payload) // 4, np.float32))})
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.start(grid, arrays, num_rounds=int(rounds), evaluate_fn=note)
    Path(output).write_text(json.dumps(ends))
