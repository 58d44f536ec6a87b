"""One step of training by an owner's unit, before any server asks for one."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from client_app.arrival import message_taken
from client_app.control_unit import ControlUnit
from client_app.round import RoundInputs, run_round
from collapipe import config
from collapipe.config.composing import compose
from collapipe.config.overrides import setting
from collapipe.errors import StageError
from collapipe.inventory.cluster import ANY_COST
from collapipe.inventory.file import read_inventory
from collapipe.models.frozen import FrozenParts
from collapipe.models.split import SplitModel
from collapipe.owner import on_machine
from collapipe.owner_file import OwnerSection
from collapipe.plan import ClusterPlan, segment_plans
from collapipe.process.cancellation import cancellable
from collapipe.process.folders import TemporaryFolder
from collapipe.report import ClusterReport
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire.messages import TrainRequest

_LIMIT_S = 120.0  # on a busy machine a step of a fresh process takes half a minute
_MOST_LETTERS = 200  # of a text
_STAND_IN = (  # a small model of the translation task, with which texts translate into themselves
    "task=multi30k data.source_column=source data.target_column=target data.partitioner=null "
    "task.max_length=64 task.vocabulary=300 model.dim=32 model.num_heads=2 "
    "model.feed_forward_dim=64 model.num_decoder_blocks=1 decoder.mode=control_unit "
    "federation.num_units=1 federation.rounds=1 federation.local_steps=1 strategy=all "
    "pipeline.profile=false pipeline.num_micro_batches=2 optimizer.warmup_steps=0 "
    "evaluation.where=units"
)


def train_one_step(owner: OwnerSection, folder: Path, texts: Sequence[str]) -> ClusterReport:
    """Train a small model of one block per device for one step on at least two ``texts``; return
    the unit's report.

    The step runs as the ``owner``'s file in ``folder`` says, on the devices of its inventory, or
    else on one simulated device. No server is asked.

    Raises ``CollaPipeError`` if the unit cannot train, or loses a device.
    """
    with TemporaryFolder("dry-run") as own:
        rows, tokenizer = own / "rows.jsonl", Tokenizer.of_bytes()
        pairs = ({"source": text[:_MOST_LETTERS], "target": text[:_MOST_LETTERS]} for text in texts)
        rows.write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
        options = [*shlex.split(_STAND_IN), setting("batch_size", len(texts))]
        options += [setting("data.train_file", rows), setting("hydra.run.dir", own / "run")]
        blocks = 1
        if owner.cluster is None:
            options.append("cluster.num_devices=1")
        else:
            section = read_inventory(folder / owner.cluster.file, ANY_COST).section
            blocks = len(section.clusters[0].devices)
        run = compose([*options, setting("model.num_blocks", blocks)])
        settings = config.load_text(replace(run, tree=on_machine(run.tree, owner, folder)).text)
        with cancellable(_LIMIT_S), message_taken():
            unit = ControlUnit(settings, 0, tokenizer)
            segments = segment_plans(unit.state().devices, [1] * blocks)
            plan = ClusterPlan(0, segments, settings.pipeline.num_micro_batches, "gpipe")
            weights = SplitModel(settings.model, tokenizer.vocabulary).state_dict()
            request = TrainRequest(1, plan, _LIMIT_S, link=None)
            fixed = FrozenParts({}, settings.model, tokenizer.vocabulary, unit.dtype, stores=[])
            inputs = RoundInputs(request, weights, fixed, head_state={}, kept={})
            report = run_round(unit, inputs).reply.report
    if report.events:
        raise StageError("the cluster", "; ".join(report.events))
    return report
