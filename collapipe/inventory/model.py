"""The model of an inventory: given by figures, or by a name from which they are counted."""

import difflib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from collapipe.devices.hardware import transformer_block_cost
from collapipe.errors import faults_of
from collapipe.inventory.schema import InventorySection, ModelSection, PipelineSection
from collapipe.inventory.yaml_file import Document
from collapipe.process.folders import in_home
from collapipe.state import BlockCost
from collapipe.validation import nearest

if TYPE_CHECKING:  # torch takes seconds
    from collapipe.models.split import ModelSpec

TOKENS = 64  # of a sample; default for a named model

_FIGURES = tuple(field.name for field in fields(BlockCost))
_CONF = Path(__file__).parents[2] / "conf"
_FILES = [*(_CONF / "model").glob("*.yaml"), *(_CONF / "task_model").glob("*_transformer.yaml")]
_KNOWN = {path.stem: path for path in sorted(_FILES)}
_NO_BLOCK = (
    "is counted on a block, and model has figures alone; name a model, or give figures that are "
    "those of your options already"
)
_OF_A_NAME = ("family", "config", "tokens", "dtype", "quantization")


@dataclass(frozen=True, slots=True)
class Model:
    """The file's ``model``; ``figures`` lacks figures that are not given."""

    num_blocks: int
    figures: Mapping[str, float]
    head_blocks: float | None = None
    head_bits: float | None = None
    times: float = 1.0  # factor of a block's compute, if all segments recompute
    recomputing: BlockCost | None = None  # of a device that does, if the planner decides
    sent: float = 1.0  # factor of a hop's bits, if stages send less than float32
    tokens: int | None = None  # of a sample; None: the file does not say
    end_bytes: tuple[int, ...] = ()  # of a causal model's embedding and head

    @property
    def cost(self) -> BlockCost:
        """A block's cost; absent figures are 0."""
        return BlockCost(**{name: self.figures.get(name, 0.0) for name in _FIGURES})

    @property
    def block_bytes(self) -> float | None:
        """Memory of one block; None: the file does not say."""
        return self.figures.get("block_bytes")


def read_model(document: Document, inventory: InventorySection) -> Model:
    """Read the file's ``model``; figures given in addition to a name take precedence.

    A name is a file of ``conf/model/`` with sizes, a folder relative to the inventory, or a hub id.
    Of a folder or hub id only the configuration is read. With ``pipeline`` or ``adapter`` the cost
    is counted on a block of the model. Raises ``ConfigError`` for an invalid model.
    """
    section, batch_size = inventory.model, inventory.batch_size
    given = {name: value for name, value in section if name in _FIGURES and value is not None}
    if "block_bytes" in given:  # the file does not say how much of it is for a batch
        given |= {"batch_block_bytes": 0.0, "batch_segment_bytes": 0.0}
    head = section.head_blocks, section.head_bits
    if section.name is None and section.family is None:
        for key in ("pipeline", "adapter"):
            if getattr(inventory, key) is not None:
                raise document.error((key,), _NO_BLOCK)
        return Model(_described(document, section), given, *head)
    if section.name in _KNOWN and inventory.pipeline is None and inventory.adapter is None:
        sizes, tokens = _sizes(document, section, _KNOWN[section.name]), section.tokens or TOKENS
        cost = transformer_block_cost(sizes["dim"], sizes["feed_forward_dim"], tokens, batch_size)
        num_blocks = section.num_blocks or int(sizes["num_blocks"])
        return Model(num_blocks, {**asdict(cost), **given}, *head, tokens=tokens)
    return _built(document, inventory, given)


def _built(document: Document, inventory: InventorySection, given: Mapping[str, float]) -> Model:
    """Return the model with the cost of a block that is built, except for the ``given`` figures."""
    from collapipe.wire.compression.codec import sent_share  # torch takes seconds

    section, how = inventory.model, inventory.pipeline or PipelineSection()
    tokens, recomputes = section.tokens or TOKENS, how.recompute is True
    spec, cost = _counted(document, inventory, tokens, recomputes)
    smaller = None
    if how.recompute == "auto" and "block_bytes" not in given:  # which is of one way
        counted = _counted(document, inventory, tokens, True)[1]
        smaller = BlockCost(**{**asdict(counted), **given})
    model = Model(
        spec.num_blocks,
        figures={**asdict(cost), **given},
        head_blocks=section.head_blocks,
        head_bits=section.head_bits,
        times=1 + cost.forward_share if recomputes else 1.0,
        recomputing=smaller,
        sent=sent_share(spec.dim, how.wire_dtype),
        tokens=tokens,
    )
    return _with_ends(model, spec, tokens) if spec.head == "causal" else model


def read_spec(document: Document, inventory: InventorySection) -> "ModelSpec":
    """Return the named model, which builds blocks with fresh weights, with the file's adapters.

    Raises ``ConfigError`` if there is no name or it is invalid.
    """
    section, adapter = inventory.model, inventory.adapter
    spec = _named(document, section)
    if adapter is None:
        for key in ("dtype", "quantization"):
            if getattr(section, key) is not None:
                raise document.error(
                    ("model", key), "is of frozen weights; add adapter, or drop it"
                )
        return spec
    from collapipe.models.lora import LoraSpec

    published: str = getattr(spec, "published_dtype", "float32")
    with _placed(document, "adapter"):
        return LoraSpec(
            spec,
            adapter.rank,
            target_modules=adapter.target_modules,
            kept=section.dtype or published,
            quantization=section.quantization,
        )


def _with_ends(model: Model, spec: "ModelSpec", tokens: int) -> Model:
    """Return ``model`` with its embedding and head, which its vocabulary makes large."""
    from collapipe.models.cost import end_bytes, head_flops
    from collapipe.models.split import original
    from collapipe.text.vocabulary import Vocabulary

    size = cast(Any, original(spec)).own_config.vocab_size
    vocabulary = Vocabulary(size, pad=0, bos=0, eos=0)
    blocks = model.head_blocks or head_flops(spec, vocabulary, tokens) / model.cost.flops
    return replace(model, head_blocks=blocks, end_bytes=end_bytes(spec, vocabulary))


def _named(document: Document, section: ModelSection) -> "ModelSpec":
    if section.name is None and section.family is None:
        raise document.error(
            ("model",), "has figures alone, of which no block can be built; name a model"
        )
    if section.name in _KNOWN:
        from collapipe.models.transformer import TransformerSpec

        sizes = _sizes(document, section, _KNOWN[section.name])
        own = {key: value for key, value in sizes.items() if key != "_target_"}
        return TransformerSpec(**own | {"num_blocks": section.num_blocks or own["num_blocks"]})
    from collapipe.models.huggingface.spec import HuggingFaceSpec  # takes seconds

    config = {key: _value(text) for key, text in (section.config or {}).items()}
    name = _located(document, section.name) if section.name else None
    with _placed(document, "model"):
        spec = HuggingFaceSpec(name, section.family, section.num_blocks, config=config)
    return cast("ModelSpec", spec)  # knows L now


def _described(document: Document, section: ModelSection) -> int:
    for key in _OF_A_NAME:
        if key in section.model_fields_set:
            raise document.error(
                ("model", key), "belongs to a model by name; give name as well, or figures alone"
            )
    if section.num_blocks is None:
        raise document.error(
            ("model", "num_blocks"),
            "is missing; give it, or name: a folder, a hub id or a file of conf/model/",
        )
    return section.num_blocks


def _sizes(document: Document, section: ModelSection, file: Path) -> dict[str, Any]:
    """Return the sizes of a model in a file of ``conf/model/`` or ``conf/task_model/``."""
    sizes: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    if file.parent.name == "task_model":  # has only the values that differ
        sizes = _sizes(document, section, _KNOWN["transformer"]) | sizes
    if "dim" not in sizes:
        raise document.error(
            ("model", "name"), f"{section.name} has no sizes; name the folder or hub id itself"
        )
    for key in ("family", "config"):
        if key in section.model_fields_set:
            raise document.error(
                ("model", key), f"{section.name} of conf/model/ has no such key; remove it"
            )
    return sizes


def _counted(
    document: Document, inventory: InventorySection, tokens: int, recompute: bool
) -> tuple["ModelSpec", BlockCost]:
    """Return the model and a block's cost, without reading or drawing weights."""
    from collapipe.models.cost import measure_cost  # torch takes seconds

    spec = read_spec(document, inventory)
    _check_tokens(document, spec, tokens)
    with _placed(document, "model"):
        return spec, measure_cost(spec, tokens, inventory.batch_size, recompute=recompute)


def _check_tokens(document: Document, spec: "ModelSpec", tokens: int) -> None:
    """Raise ``ConfigError`` if a sample has more tokens than the model has positions for."""
    from collapipe.models.split import original

    config: Any = getattr(original(spec), "own_config", None)  # of a Hugging Face model
    if config is None:
        return
    from collapipe.models.huggingface.layers import fault_of_length  # takes seconds

    if fault := fault_of_length(config, tokens):
        raise document.error(("model", "tokens"), f"{fault}, not {tokens}; lower it")


def _placed(document: Document, key: str) -> AbstractContextManager[None]:
    """Put the line of ``key`` before errors that begin with an option."""
    return faults_of(f"{document.file}:{document.line((key,))}")


def _located(document: Document, name: str) -> str:
    """Return ``name`` as a folder relative to the inventory, if it exists, else as a hub id."""
    folder = Path(document.file).parent / in_home(name)
    if folder.is_dir():
        return str(folder)
    if difflib.get_close_matches(name, _KNOWN, cutoff=0.8):  # the hub may take long
        known = nearest(name, _KNOWN)
        raise document.error(("model", "name"), f"no model of conf/model/{known}")
    return name


def _value(text: str) -> Any:
    """Parse a JSON value; any other text stays a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
