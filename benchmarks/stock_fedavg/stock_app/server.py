"""Flower's FedAvg with the time at which each round ends."""

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
    rounds, payload, output, count = shlex.split(str(context.run_config["overrides"]))
    ends: list[float] = []

    def note(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        ends.append(time.perf_counter())
        return None

    size = int(payload) // 4 // int(count)
    named = ((f"weights-{n}", np.full(size, n, np.float32)) for n in range(int(count)))
    arrays = ArrayRecord({name: Array(values) for name, values in named})
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.start(grid, arrays, num_rounds=int(rounds), evaluate_fn=note)
    Path(output).write_text(json.dumps(ends))
