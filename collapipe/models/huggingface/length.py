"""How many tokens a model has positions for."""

from typing import Any

from torch import Tensor

from collapipe.errors import ConfigError


def check_length(config: Any, ids: Tensor) -> None:
    """Raise ``ConfigError`` where ``ids`` [b, s] are longer than the table of positions."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:  # T5 has none
        return
    if config.model_type == "roberta":  # counts from behind its padding id
        limit -= config.pad_token_id + 1
    if ids.shape[1] > limit:
        raise ConfigError(
            f"model.name: this {config.model_type} has positions for {limit} tokens, a sample has "
            f"{ids.shape[1]}; lower task.max_length"
        )
