"""The hub is asked once, and for a short time: where it does not answer, the cache has to do."""

import os
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError
from transformers import PretrainedConfig

from collapipe.errors import one_line

_CONFIG = "config.json"
_PATIENCE_S = 2.5  # for an answer, name resolution included; HF_HUB_ETAG_TIMEOUT overrides it


def config_fields(name: str) -> dict[str, Any]:
    """The ``config.json`` of a folder, or of a hub id: the hub's, or the cached one.

    Raises ``OSError`` or ``ValueError`` where there is none.
    """
    silence = "" if Path(name).is_dir() else _silence(name)
    try:
        raw, _ = PretrainedConfig.get_config_dict(name, local_files_only=bool(silence))
    except OSError as error:
        if silence:
            raise OSError(f"{silence}, and the cache has no {_CONFIG} of it") from error
        raise
    return dict(raw)


def _silence(name: str) -> str:
    """Why the hub cannot be asked; empty where it answered, be it that it has no such model."""
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    patience = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or _PATIENCE_S)
    problem = f"{constants.ENDPOINT} did not answer within {patience:g} s"

    def ask() -> None:
        nonlocal problem
        try:
            get_hf_file_metadata(hf_hub_url(name, _CONFIG), timeout=patience)
            problem = ""
        except HfHubHTTPError as error:
            failed = error.response.status_code >= 500
            problem = f"{constants.ENDPOINT} answered {one_line(error)}" if failed else ""
        except Exception as error:  # of the network, or of a name that cannot be an id
            problem = f"{constants.ENDPOINT} cannot be asked: {one_line(error)}"

    thread = threading.Thread(target=ask, daemon=True)  # a resolver may wait longer than we do
    thread.start()
    thread.join(patience)
    return problem
