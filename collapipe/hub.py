"""Ask the hub briefly whether it answers, so that a machine without a network reads its cache."""

import os
import threading
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from collapipe.errors import one_line

_PATIENCE_S = 2.5  # for an answer, name resolution included; HF_HUB_ETAG_TIMEOUT overrides it


def hub_silence(name: str, kind: Literal["model", "dataset"] = "model") -> str:
    """Return why the hub cannot be asked about ``name``, so that the cache must be used.

    Empty for a folder, and if the hub answered, even with "no such file".
    """
    if Path(name).is_dir():
        return ""
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    patience = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or _PATIENCE_S)
    problem = f"{constants.ENDPOINT} did not answer within {patience:g} s"

    def ask() -> None:
        nonlocal problem
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json", repo_type=kind), timeout=patience)
            problem = ""
        except HfHubHTTPError as error:
            failed = error.response.status_code >= 500
            problem = f"{constants.ENDPOINT} answered {one_line(error)}" if failed else ""
        except HFValidationError:
            problem = "there is no such folder"  # nor can it be an id of the hub
        except Exception as error:  # network errors
            problem = f"{constants.ENDPOINT} cannot be asked: {one_line(error)}"

    thread = threading.Thread(target=ask, daemon=True)  # name resolution may ignore the timeout
    thread.start()
    thread.join(patience)
    return problem
