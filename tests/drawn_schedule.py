"""Draws a schedule like docs/explanation/round.md."""

from pipeline.schedule import Action, Schedule, ready, verify


def render(schedule: Schedule) -> str:
    """Return a line per stage and a column per time slot of one action; ``·`` marks an idle
    stage."""
    verify(schedule)
    done: list[set[Action]] = [set() for _ in schedule]
    places = [0] * len(schedule)
    rows: list[list[str]] = [[] for _ in schedule]
    while any(place < len(actions) for place, actions in zip(places, schedule, strict=True)):
        slot = [
            actions[place] if place < len(actions) and ready(actions[place], stage, done) else None
            for stage, (place, actions) in enumerate(zip(places, schedule, strict=True))
        ]
        for stage, action in enumerate(slot):
            rows[stage].append("·" if action is None else str(action))
            if action is not None:
                done[stage].add(action)
                places[stage] += 1
    width = max(len(cell) for row in rows for cell in row)
    names = [f"segment {stage}" for stage in range(len(schedule) - 1)] + ["head"]
    label = max(map(len, names))
    return "\n".join(
        f"{name:<{label}}  {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for name, row in zip(names, rows, strict=True)
    )
