"""Sections of ``conf/`` with a test's changes."""

from types import SimpleNamespace
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf

from collapipe.config import Settings
from collapipe.config.settings import CONF
from collapipe.sections import (
    FederationSettings,
    LinkSettings,
    LoraSettings,
    OptimizerSettings,
    PrivacySettings,
    ServerOptimizerSettings,
)
from collapipe.validation import typed

T = TypeVar("T")


def section(kind: type[T], file: str, option: str | None = None, **changes: Any) -> T:
    """Return the section in the file, or in its ``option``, with ``changes``."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(CONF / file))
    return typed("section", kind, {**(tree[option] if option else tree), **changes})


def optimizer_settings(name: str = "adamw", **changes: Any) -> OptimizerSettings:
    """Return settings with a constant learning rate, so that steps can be checked by hand."""
    steady = {"lr": 1e-3, "warmup_steps": 0, "decay": "constant", "clip_norm": 1.0}
    return section(OptimizerSettings, f"optimizer/{name}.yaml", **{**steady, **changes})


def server_optimizer_settings(name: str, **changes: Any) -> ServerOptimizerSettings:
    """Return the settings in the file of this name."""
    return section(ServerOptimizerSettings, f"server_optimizer/{name}.yaml", **changes)


def federation_settings(**changes: Any) -> FederationSettings:
    """Return the default settings."""
    return section(FederationSettings, "federation/default.yaml", **changes)


def privacy_settings(**changes: Any) -> PrivacySettings:
    """Return settings without privacy."""
    return section(PrivacySettings, "privacy/none.yaml", **changes)


def adapter_settings(**changes: Any) -> LoraSettings:
    """Return settings for adapters of rank 2."""
    return section(LoraSettings, "adapter/lora.yaml", **{"rank": 2, "alpha": 8.0, **changes})


def run_settings(runtime_name: str = "local", **changes: Any) -> Settings:
    """Return the run options that ``Units`` reads, with changes of federation options."""
    federation, runtime = federation_settings(**changes), SimpleNamespace(name=runtime_name)
    return cast(Settings, SimpleNamespace(federation=federation, runtime=runtime, text=""))


def link_settings(**changes: Any) -> LinkSettings:
    """Return the default settings."""
    return section(LinkSettings, "config.yaml", "link", **changes)
