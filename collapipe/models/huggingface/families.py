"""Which part of a model stands where, family by family: names as transformers has them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from collapipe.models.huggingface import causal, encoders, seq2seq, t5
from collapipe.models.huggingface.absent import Absent

_CLASSES = {
    "tokens": "AutoModelForTokenClassification",
    "pooled": "AutoModelForSequenceClassification",
    "causal": "AutoModelForCausalLM",
    "decoder": "AutoModelForSeq2SeqLM",
}


@dataclass(frozen=True)
class Family:
    """Models of one ``model_type``.

    Attributes
    ----------
    layers
        Path of the list of layers of which the first L are the blocks.
    embedding
        What the weights' names of the control unit begin with; all others are the head's.
    sizes
        Fields that ``config.json`` must have, the number of layers first.
    heads
        Kinds of heads, the default first.
    embed, block
        Modules around the embedding and around a layer.
    copies
        Weight → weight behind the blocks that it is a copy of, so that it needs no place.
    twins
        An embedding of the control unit and the one behind the blocks that is often the same.
    """

    layers: str
    embedding: tuple[str, ...]
    sizes: tuple[str, ...]
    heads: tuple[str, ...]
    embed: type[nn.Module]
    block: type[nn.Module]
    copies: Mapping[str, str] = field(default_factory=dict)
    twins: tuple[str, str] | None = None

    @property
    def blocks_are_all_layers(self) -> bool:
        """Whether no layer of the list stands behind the blocks."""
        return "causal" not in self.heads

    def class_name(self, head: str) -> str:
        """The class of transformers that makes the whole model."""
        return _CLASSES[head]

    def build_head(self, head: str, original: Any, num_blocks: int) -> nn.Module:
        """A ``Head`` around what is left of the model behind the blocks."""
        if head == "tokens":
            return encoders.TokenHead(original)
        if head == "pooled":
            return encoders.PooledHead(original)
        if head == "causal":
            return causal.CausalHead(original, num_blocks, self.layers)
        return (t5.T5Head if self.block is t5.Block else seq2seq.Seq2SeqHead)(original)

    def copies_in(self, original: Any) -> dict[str, str]:
        """``copies`` that the configuration asks for, of weights that the model has."""
        tied = original.config.tie_word_embeddings
        return {
            name: source
            for name, source in self.copies.items()
            if (tied or "shared" in name) and _has(original, name)
        }


def _has(original: nn.Module, name: str) -> bool:
    try:
        owner = original.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return False
    return not isinstance(owner, Absent)


def _encoder(
    base: str,
    layers: str = "encoder.layer",
    sizes: tuple[str, ...] = ("num_hidden_layers", "hidden_size"),
) -> Family:
    embedding = (f"{base}.embeddings.", f"{base}.embeddings_project.")
    heads = ("tokens", "pooled")
    sizes = (*sizes, "vocab_size")
    return Family(f"{base}.{layers}", embedding, sizes, heads, encoders.Embedding, encoders.Block)


_LLAMA = Family(
    "model.layers",
    ("model.embed_tokens.",),
    ("num_hidden_layers", "hidden_size", "vocab_size"),
    ("causal",),
    causal.Embedding,
    causal.Block,
    twins=("model.embed_tokens.weight", "lm_head.weight"),
)
_BART = Family(
    "model.encoder.layers",
    ("model.encoder.",),
    ("encoder_layers", "d_model", "vocab_size"),
    ("decoder",),
    seq2seq.Embedding,
    encoders.Block,
    {
        "lm_head.weight": "model.decoder.embed_tokens.weight",
        "model.shared.weight": "model.decoder.embed_tokens.weight",
    },
    ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
)
FAMILIES: Mapping[str, Family] = {
    "bert": _encoder("bert"),
    "roberta": _encoder("roberta"),
    "electra": _encoder("electra"),
    "distilbert": _encoder("distilbert", "transformer.layer", ("n_layers", "dim")),
    "gpt2": Family(
        "transformer.h",
        ("transformer.wte.", "transformer.wpe."),
        ("n_layer", "n_embd", "vocab_size"),
        ("causal",),
        causal.Embedding,
        causal.Block,
        twins=("transformer.wte.weight", "lm_head.weight"),
    ),
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "bart": _BART,
    "marian": _BART,
    "t5": Family(
        "encoder.block",
        ("encoder.embed_tokens.",),
        ("num_layers", "d_model", "vocab_size"),
        ("decoder",),
        t5.Embedding,
        t5.Block,
        {
            "lm_head.weight": "decoder.embed_tokens.weight",
            "shared.weight": "decoder.embed_tokens.weight",
        },
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    ),
}
