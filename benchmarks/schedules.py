"""Times of schedules in a discrete-event simulation, relative to the times that the planner
expects.

After the last segment follow the uplink, the head on the server and the gradients' downlink. First
it simulates the best partitions of 60 clusters of Table II, whose upload takes about as long as
their pipeline. They run with the uplink alone, and with 10 s in the head and 5 s of gradients a
batch. Then it simulates 600 random pipelines, whose later stages are as slow as a segment or
slower. Columns are the minimum, mean and maximum of the ratio; above 1, a schedule takes longer
than planned.
"""

import argparse
import statistics

from pipeline.schedule import gpipe, one_f_one_b
from tests.optim.schedule_runs import (
    ALL,
    LAWS,
    UPLINK,
    Case,
    Scheduler,
    draws,
    papers,
    ratios,
    two_more_in_flight,
)

SCHEDULES: dict[str, Scheduler] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "1f1b, two more ahead": two_more_in_flight,
}
HEADER = f"{'':<64}{'least':>7}{'mean':>7}{'most':>7}"


def table() -> list[str]:
    """A line for each world, law and schedule."""
    lines = []
    for law in LAWS:
        worlds: dict[str, list[Case]] = {
            "Table II, uplink": papers(law),
            "Table II, uplink, head, downlink": papers(law, 10.0, 5.0),
        }
        if law == "flow_shop":
            worlds["random, uplink"] = draws(600, UPLINK, constant_ratios=False)
            worlds["random, uplink, head, downlink"] = draws(600, ALL, constant_ratios=False)
        for world, cases in worlds.items():
            for name, schedule in SCHEDULES.items():
                found = ratios(cases, schedule, law)
                figures = min(found), statistics.mean(found), max(found)
                columns = "".join(f"{each:>7.3f}" for each in figures)
                lines.append(f"{f'{world}; {law}; {name}':<64}{columns}")
    return lines


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(HEADER, *table(), sep="\n")
