"""What depends on Flower's commands and on its unpublished interfaces.

CollaPipe supports the versions ``KNOWN`` alone; importing any module of this package checks the
installed one. Other packages import only ``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp`` and
``flwr.serverapp.strategy``, which Flower documents. Each row is needed with all ``KNOWN`` versions.
The named test fails if Flower changes.

===========  =====================================  ===================================  ===========
module       uses, or replaces (=)                  because Flower                       test
===========  =====================================  ===================================  ===========
commands     variables and JSON of ``flwr``         has no library for it                simulation
inline_grid  ``TaskIdentity``, for ``Message``      sets it only in its own processes    prompt_grid
prompt_grid  = ``Grid.send_and_receive``            polls every 3 s                      prompt_grid
prompt_grid  ``HttpGrid._runtime_client``           trusts what a node announces         pulling
reply_parts  format of messages' parts              expands parts without a limit        pulling
requests     Fleet and Control API over HTTP        authenticates only nodes, and late   guard
runtime      = first wait of ``pull_objects``       waits 1 s for a part                 runtime
runtime      Runtime API of a SuperNode             would run the server's code          answering
superexec    = ``get_executor``                     starts a slow process twice          superexec
superlink    = ``_get_superexec_command``           has no option for it                 superexec
superlink    = ``InMemoryObjectStore``'s trees      expands trees without a limit        trees
superlink    = ``uvicorn.run``                      has no option for a guard            addresses
supernode    = ``HEARTBEAT_CALL_TIMEOUT``           gives up after 5 s                   supernode
supernode    = ``time.sleep`` between polls         polls every 3 s                      supernode
===========  =====================================  ===================================  ===========
"""

from importlib.metadata import version

from collapipe.errors import ConfigError

KNOWN = "1.41", "1.42"
"""Versions of Flower; ``pyproject.toml`` requires the same."""


def check_version(installed: str) -> None:
    """Raise ``ConfigError`` if CollaPipe does not support this version of Flower."""
    if ".".join(installed.split(".")[:2]) not in KNOWN:
        raise ConfigError(
            f"flwr {installed} is installed, CollaPipe works with {' and '.join(KNOWN)}; "
            f"pip install 'flwr=={KNOWN[-1]}.*'"
        )


check_version(version("flwr"))
