"""Options that were set and have no effect with the other options.

Options that a framework does not use only cause a warning: sweeps over frameworks set them for
all.
"""

from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from typing import Any

from collapipe.config.resolved import value_at
from collapipe.config.settings import Settings
from collapipe.config.trust import PLUGINS
from collapipe.errors import written
from collapipe.sections import LoraSettings

_PLUG_INS = "channel", "cluster", "environment", "model", "strategy", "task"
_OF_SEGMENTS = tuple(
    f"pipeline.{name}" for name in ("num_segments", "num_micro_batches", "schedule", "recompute")
)
# A federation's server gives each run the link's addresses.
_LINK = "link.max_message_bytes", "link.reconnect_s", "link.frame_timeout_s"
_OF_LINK = (
    *(*_LINK, "channel.activation_bits", "channel.head_s", "channel.downlink_rate_bps"),
    "compression.activation",
)
_OF_TRAINING = (
    *("server_optimizer", "federation.eval_every", "federation.weighting", "federation.max_share"),
    *("federation.max_update_norm", "federation.channel_noise", *_LINK),
)
_OF_DEVICES = "pipeline.relay", "pipeline.keep_shares", "pipeline.replicate_every"
_OF_ENVIRONMENT = {  # option → others that have no effect while it is 0
    "speed_deviation": ("speed_correlation",),
    "leave_probability": ("return_probability",),
    "mobility.speed_m_per_s": tuple(
        f"mobility.{name}"
        for name in ["correlation", "round_s", "radius_m", "least_distance_m", "path_loss_exponent"]
    ),
}
_OF_TOKENIZER = {
    *("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("decoder_start_token_id", "decoder_vocab_size"),
}


def idle_options(settings: Settings) -> Iterator[str]:
    """Yield an error message for each option that differs from its default and is not used."""
    of_sections = _of_optimizers(settings), _of_privacy(settings), _of_messages(settings)
    for option, default, why in chain(*of_sections):
        value = value_at(settings.tree, option)
        if value != default:
            yield f"{option}={written(value)}: {why}; set {option}={written(default)}"
    yield from _of_data(settings)
    given = settings.tree["model"].get("config") or {}
    for name in sorted(_OF_TOKENIZER & given.keys()):
        yield f"model.config.{name}={given[name]}: the run's tokeniser decides it; leave it out"


def unused_options(settings: Settings) -> Iterator[str]:
    """Yield a warning for each choice that makes no use of some of the options that were given, and
    for options that were added outside all sections."""
    every = (each.lstrip("+").partition("=")[0] for each in settings.overrides)
    given = [name for name in dict.fromkeys(every) if not _is_of_own_class(settings, name)]
    for choice, unused in _not_used(settings):
        names = [name for name in given if f"{name}.".startswith(tuple(f"{u}." for u in unused))]
        if names:
            yield f"{', '.join(names)}: no effect with {choice}"
    if unknown := settings.tree.keys() - {*_PLUG_INS, *(field.name for field in fields(settings))}:
        yield f"{', '.join(sorted(unknown))}: no effect, because no run has this option"


def _is_of_own_class(settings: Settings, option: str) -> bool:
    """Whether the option belongs to a user's class, which may use it in its own way."""
    target = value_at(settings.tree, f"{option.partition('.')[0]}._target_")
    return target is not None and str(target).partition(".")[0] not in PLUGINS


def _not_used(settings: Settings) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield choices and the options, or whole sections, of which they make no use."""
    framework = settings.framework
    name = f"framework={framework.name}"
    if framework.unsplit:
        yield name, (*_OF_SEGMENTS, *_OF_LINK, "decoder", "compression.gradient")
    elif not settings.server_has_heads:
        yield f"decoder.mode={settings.decoder.mode}", _OF_LINK
    if framework.partition is not None:
        yield name, ("strategy.partition",)
    if not framework.train:
        yield "framework.train=false", _OF_TRAINING
    elif not framework.aggregate:
        yield name, ("server_optimizer",)
    if settings.compression.activation == "float32":  # rows are sent whole, yet with their numbers
        yield "compression.activation=float32", ("compression.feedback",)
    owned = settings.runtime.name == "deployment"  # owners' files may name real devices
    if not owned and not hasattr(settings.build("cluster"), "roster"):
        yield "simulated devices", _OF_DEVICES
    for cause, unused in _OF_ENVIRONMENT.items():
        if value_at(settings.tree, f"environment.{cause}") == 0:
            yield f"environment.{cause}=0", tuple(f"environment.{each}" for each in unused)


def _of_optimizers(settings: Settings) -> Iterator[tuple[str, Any, str]]:
    """Yield each option that the chosen rules do not use, its default, and the reason."""
    local, server = settings.optimizer.name, settings.server_optimizer.name
    sgd, adam = ("momentum", 0.0), (("beta1", 0.9), ("beta2", 0.98), ("eps", 1e-9))
    for name, default in (sgd,) if local == "adamw" else adam:
        yield f"optimizer.{name}", default, f"optimizer.name={local} makes no use of it"
    unused = [] if server == "adam" else [("beta2", 0.99), ("eps", 1e-3)]
    unused += [("momentum", 0.0)] if server in ("fedavg", "sgd") else []
    unused += [("lr", 1.0)] if server == "fedavg" else []
    for name, default in unused:
        yield (
            f"server_optimizer.{name}",
            default,
            f"server_optimizer.name={server} makes no use of it",
        )
    if (average := settings.server_optimizer.average) != "trimmed_mean":
        why = f"server_optimizer.average={average} trims nothing"
        yield "server_optimizer.trim", 0.1, why
    if isinstance(settings.adapter, LoraSettings) and not settings.adapter.cache:
        yield "adapter.cache_bytes", 2**32, "adapter.cache=false stores nothing"


def _of_privacy(settings: Settings) -> Iterator[tuple[str, Any, str]]:
    """Yield as ``_of_optimizers`` does."""
    if not settings.privacy.noise_multiplier:
        for name, default in (("delta", 1e-5), ("noise_seed", None)):
            yield f"privacy.{name}", default, "privacy.noise_multiplier=0 adds no noise"
    if not settings.privacy.secure_aggregation:
        why = "privacy.secure_aggregation=false shares no keys among units"
        yield "privacy.threshold", 2 / 3, why


def _of_messages(settings: Settings) -> Iterator[tuple[str, Any, str]]:
    """Yield as ``_of_optimizers`` does, for options of what units and server send."""
    if settings.decoder.mode == "control_unit":
        why = "with decoder.mode=control_unit the server sends no gradients"
        yield "compression.gradient", "float32", why
    given, sent = value_at(settings.tree, "strategy.error_budget"), settings.compression
    chosen = "auto" in (sent.upload, sent.activation)
    if given is not None and not (chosen or _is_of_own_class(settings, "strategy.error_budget")):
        why = "neither compression.upload nor compression.activation is auto"
        yield "strategy.error_budget", 1e-3, why
    tokenizer = settings.data.tokenizer or settings.model.own_tokenizer
    if tokenizer not in (None, "federated"):
        why = f"the run's tokeniser, {tokenizer}, is not made of the units' words"
        yield "data.tokenizer_min_rows", 1, why


def _of_data(settings: Settings) -> Iterator[str]:
    """Yield messages for options of ``data``, of which the task decides what it uses."""
    data, task = settings.data, settings.task
    columns = task.columns if data.brought else ()
    used = {*settings.tree["task"], *(f"{column}_column" for column in columns)}
    used |= {"config"} if data.name is not None else set()
    for field in fields(data):
        name, value = field.name, getattr(data, field.name)
        idle = name in ("root", "synthetic", "config") or name.endswith("_column")
        if not idle or name in used or value == field.default:
            continue
        if name.endswith("_column") and not data.brought:
            why = "names a column of data.train_file or data.name, which are not set"
        elif name == "config":
            why = "belongs to data.name, which is not set"
        else:
            why = f"task={task.name} makes no use of it"
        yield f"data.{name}={written(value)}: {why}; set data.{name}={written(field.default)}"
