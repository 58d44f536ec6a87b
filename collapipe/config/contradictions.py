"""Combinations of options that do not work; each has a message with the way out."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from collapipe.config.resolved import value_at
from collapipe.config.settings import Settings
from collapipe.sections import LoraSettings

if TYPE_CHECKING:
    from collapipe.devices.presets import ClusterPreset


def contradictions(settings: Settings) -> Iterator[str]:
    """Yield an error message for each combination of options that does not work.

    Of the plug-ins only task and model are built.
    """
    yield from _misfits(settings)
    fadings = {value_at(settings.tree, f"{group}.fading") for group in ("strategy", "environment")}
    if fadings == {"rayleigh"}:
        yield (
            "strategy.fading=rayleigh with environment.fading=rayleigh: gains that fade in every "
            "round would be averaged over fading again; set one of them to none"
        )
    if settings.compression.feedback and not settings.server_has_heads:
        yield (
            "compression.feedback=true: no activations are sent with decoder.mode=control_unit, or "
            f"if framework={settings.framework.name} trains unsplit models; set "
            "compression.feedback=false"
        )
    if settings.privacy.clip_norm is not None:
        yield from _unprotected(settings)
    if settings.privacy.secure_aggregation:
        yield from _unsummed(settings)
    if not settings.framework.train:
        yield from _without_training(settings)
    if settings.pipeline.num_micro_batches > settings.batch_size:
        yield (
            f"pipeline.num_micro_batches={settings.pipeline.num_micro_batches}: more than "
            f"batch_size={settings.batch_size}; a micro-batch holds at least one sample"
        )


def _misfits(settings: Settings) -> Iterator[str]:
    """Yield messages for a task and a model, or a cut and a head, that do not fit each other."""
    task, head, cut = settings.task, settings.model.head, settings.framework.cut
    if head not in task.heads:
        from collapipe.models.split import TASKS

        other = "another model: model=huggingface model.name=FOLDER_OR_HUB_ID or model.family=NAME"
        target = str(value_at(settings.tree, "model._target_"))
        if target.endswith(".HuggingFaceSpec") and {head, *task.heads} <= {"pooled", "tokens"}:
            other = f"model.head={task.heads[0]}"
        yield (
            f"task={task.name}: trains a head {' or '.join(task.heads)}, and this model has {head}"
            f"; set {TASKS.get(str(head), 'another task')}, or {other}"
        )
    elif getattr(task, "packing", False):
        from collapipe.models.split import packs

        if not packs(settings.model):
            yield (
                "task.packing=true: layers of this model would let conversations of a row see each "
                "other; set task.packing=false"
            )
    mode = settings.decoder.mode
    if cut is not None and mode in ("control_unit", "auto"):
        yield (
            f"framework.cut={cut}: the server trains the later blocks with the head, but with "
            f"decoder.mode={mode} units have the head; set decoder.mode=per_cluster"
        )


def _without_training(settings: Settings) -> Iterator[str]:
    """Yield messages for options that need a model that trains."""
    if settings.federation.clock == "real":
        yield (
            "federation.clock=real: with framework.train=false nothing is trained that could be "
            "measured; set federation.clock=modelled"
        )
    if settings.evaluation.on_units:
        yield (
            f"evaluation.where={settings.evaluation.where}: with framework.train=false nothing is "
            "trained that could be evaluated; leave it out"
        )


def faults_in_cluster(settings: Settings, cluster: "ClusterPreset") -> Iterator[str]:
    """Yield messages for options that do not fit the plug-in ``cluster``.

    Raises ``ConfigError`` for a model that its real devices cannot build.
    """
    real = hasattr(cluster, "roster")
    if real and settings.framework.train:
        from collapipe.models.description import describe

        describe(settings.model)
    if settings.pipeline.profile and not real:
        yield (
            "pipeline.profile=true: the devices of this run are simulated in one process, so that "
            "their measured times would be those of one machine; leave it out, and give devices "
            "their speeds by cluster.file, or take cluster=devices"
        )
    segments, most = settings.pipeline.num_segments or 0, cluster.num_devices
    if segments > most:
        yield (
            f"pipeline.num_segments={segments}: more than cluster.num_devices={most}; "
            "a device holds one segment at most"
        )
    if segments > settings.model.num_blocks:
        blocks = "model.num_blocks" if settings.framework.cut is None else "framework.cut"
        if isinstance(settings.adapter, LoraSettings) and settings.adapter.last_blocks:
            blocks = "adapter.last_blocks"
        yield (
            f"pipeline.num_segments={segments}: more than {blocks}={settings.model.num_blocks}; "
            "a segment holds at least one block"
        )


def _unprotected(settings: Settings) -> Iterator[str]:
    """Yield messages for options with which clipping and noise would not protect units."""
    clipped = f"privacy.clip_norm={settings.privacy.clip_norm:g}"
    if settings.server_has_heads:
        yield (
            f"{clipped}: with decoder.mode={settings.decoder.mode} units send activations and "
            "targets, which neither clipping nor noise covers; set decoder.mode=control_unit, or "
            "begin with privacy=private, which sets all that clipping needs"
        )
    if not settings.framework.aggregate:
        yield (
            f"{clipped}: framework={settings.framework.name} averages nothing, and would show each "
            "unit's model; take another framework, or set privacy.clip_norm=null"
        )
    if settings.federation.weighting != "uniform":
        yield f"{clipped}: requires units of equal weight; set federation.weighting=uniform"
    noise, most = settings.privacy.noise_multiplier, settings.federation.max_update_norm
    if noise and most is not None:
        yield (
            f"privacy.noise_multiplier={noise:g}: by federation.max_update_norm={most:g} each "
            "unit's norm decides whether others count, which no noise covers; set it to null: "
            "privacy.clip_norm bounds what units change"
        )
    estimated = value_at(settings.tree, "strategy.constants") == "estimated"
    target = value_at(settings.tree, "strategy._target_")
    if noise and (estimated or target == "optim.baselines.HighestLoss"):
        what = "constants=estimated" if estimated else "_target_=optim.baselines.HighestLoss"
        yield (
            f"privacy.noise_multiplier={noise:g}: strategy.{what} reads losses or gradients, which "
            "no noise covers; set strategy=dssra with strategy.constants=set, delay_only, random, "
            "all or even"
        )
    if settings.server_optimizer.average != "mean":
        yield (
            f"{clipped}: noise is meant for a mean; set server_optimizer.average=mean, or "
            "privacy.clip_norm=null"
        )


def _unsummed(settings: Settings) -> Iterator[str]:
    """Yield messages for options that do not work if the server learns only the updates' sum."""
    federation, masked = settings.federation, "privacy.secure_aggregation=true: "
    if federation.max_update_norm is not None:
        yield (
            f"{masked}federation.max_update_norm={federation.max_update_norm:g} compares the norms "
            "of single updates, which the server cannot see; set it to null: privacy.clip_norm "
            "bounds them"
        )
    if federation.channel_noise:
        yield (
            f"{masked}federation.channel_noise={federation.channel_noise:g} is noise in single "
            "updates, which the server cannot see; set it to 0"
        )
    if settings.compression.upload == "auto":
        yield (
            f"{masked}compression.upload=auto may give units different precisions, in which they "
            "have no sum; choose one"
        )
    if settings.optimizer.state == "keep" and federation.checkpoint_every:
        yield (
            f"{masked}optimizer.state=keep: what a unit's optimiser remembers is made of its "
            "gradients, which no checkpoint may show; set optimizer.state=reset, or "
            "federation.checkpoint_every=0"
        )
    if federation.num_units == 1:
        yield f"{masked}federation.num_units=1: a sum hides nothing of one unit; have more"


def faults_in_length(settings: Settings) -> Iterator[str]:
    """Yield a message if a causal model is to train on more tokens than it has positions for: with
    a table of positions it cannot, and other models would not continue texts of this length."""
    if settings.model.head != "causal":
        return
    from collapipe.models.huggingface.layers import fault_of_length
    from collapipe.models.split import original

    config, tokens = getattr(original(settings.model), "own_config", None), settings.task.max_length
    if config is not None and (fault := fault_of_length(config, tokens)):
        yield f"task.max_length={tokens}: {fault}; lower it"


def faults_in_data(settings: Settings) -> Iterator[str]:
    """Yield a message if the server would need rows from the simulated units' training file."""
    data, where = settings.data, settings.evaluation.where
    if not settings.has_owners_rows and data.holds_out and settings.evaluates_on_server:
        missing = "test" if data.validation_file else "validation"
        yield (
            f"evaluation.where={where}: data.{missing}_file is not set, and the server opens no "
            "training rows to draw any from them; set it, or evaluation.where=units"
        )
