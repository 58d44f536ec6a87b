"""Seconds of ``collapipe predict`` and of transformers' ``generate``, each in new processes."""

import os
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from benchmarks.arguments import at_least
from benchmarks.devices.sides import about, ratio, save
from benchmarks.language_models.runs import COLLAPIPE, add_model, on_conversations, run

_TEXT = "Translate this date to English: Dienstag, 3. Mai 2033"
_GENERATE = """
import sys, transformers
folder, text, count = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
given = tokenizer(text, return_tensors="pt")
made = model.generate(**given, max_new_tokens=int(count), do_sample=False)
print(tokenizer.decode(made[0, given["input_ids"].shape[1]:], skip_special_tokens=True))
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for the model, turns and tokens."""
    add_model(parser)
    parser.add_argument("--turns", type=at_least(1), default=3)
    parser.add_argument("--tokens", type=at_least(1), default=32)


def main(arguments: Namespace) -> None:
    options = [
        *on_conversations(arguments, rows=100, tokens=64, batch=4),
        *("federation.rounds=1", "federation.local_steps=1"),
    ]
    run(arguments.output / "generation", options)
    count = str(arguments.tokens)
    run_dir = str(arguments.output / "generation")
    commands = {
        "predict": [*COLLAPIPE, "predict", run_dir, _TEXT, "--max-new-tokens", count],
        "generate": [sys.executable, "-c", _GENERATE, str(arguments.model), _TEXT, count],
    }
    wall_s: dict[str, list[float]] = {side: [] for side in commands}
    cpu_s: dict[str, list[float]] = {side: [] for side in commands}
    printed: dict[str, str] = {}
    for _ in range(arguments.turns):
        for side, command in commands.items():
            printed[side], wall, cpu = spent(command)
            wall_s[side].append(wall)
            cpu_s[side].append(cpu)
    for side, text in printed.items():
        wall, cpu = statistics.median(wall_s[side]), statistics.median(cpu_s[side])
        print(f"{side:<9} {wall:>6.1f} s, {cpu:>6.1f} CPU s: {text!r}")
    for name, found in (("wall", wall_s), ("CPU", cpu_s)):
        print(f"{name} predict / generate {ratio(found['predict'], found['generate'])}")
    result = {"about": about(arguments), "wall_s": wall_s, "cpu_s": cpu_s, "said": printed}
    save(arguments.output, "generation", result)


def spent(command: Sequence[str]) -> tuple[str, float, float]:
    """The output of a process, its wall seconds and its processor seconds."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        text = process.stdout.read().decode()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return text, time.perf_counter() - start, used.ru_utime + used.ru_stime
