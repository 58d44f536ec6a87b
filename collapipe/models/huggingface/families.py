"""Layout of each model family; the only file that maps transformers' weight names to ours.

Our names have the original name after ``original.``; in a block, the part after the layer's number:
``bert.encoder.layer.3.output.dense.weight`` is ``blocks.3.original.output.dense.weight``, and
``classifier.bias`` is ``head.original.classifier.bias``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from collapipe.models.huggingface import heads, layers
from collapipe.models.split import EMBEDDING, HEAD, block_name

CLASSES = {  # kind of head → transformers' class of the whole model, and peft's task_type
    "tokens": ("AutoModelForTokenClassification", "TOKEN_CLS"),
    "pooled": ("AutoModelForSequenceClassification", "SEQ_CLS"),
    "causal": ("AutoModelForCausalLM", "CAUSAL_LM"),
    "decoder": ("AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM"),
}
_ORIGINAL = ".original."
OF_LABELS = {"tokens": heads.TaskHead, "pooled": heads.PooledHead}  # may begin fresh
Sizes = tuple[str, str]
Heads = Mapping[str, type[heads.WrappedHead]]


@dataclass(frozen=True)
class Family:
    """Models of one ``model_type``."""

    layers: str  # path of the list of layers of which the first L are the blocks
    embedding: tuple[str, ...]  # prefixes of the embedding's weight names, at the control unit
    sizes: Sizes  # fields of ``config.json``: the number of layers, the activations' width
    heads: Heads  # kind of head → class of the rest of the model after the blocks; default first
    embed: type[nn.Module]  # wraps the embedding
    block: type[nn.Module]  # wraps a layer
    # Weight → the head's weight that it is a copy of, so that it is not stored.
    copies: Mapping[str, str] = field(default_factory=dict)
    # The input embedding and the head's weight that the original may share with it.
    twins: tuple[str, str] | None = None

    def copies_in(self, original: Any) -> dict[str, str]:
        """Return the ``copies`` that the configuration ties and that the whole model has."""
        there = dict(original.named_modules(remove_duplicate=False))
        return {
            name: source
            for name, source in self.copies.items()
            if (original.config.tie_word_embeddings or "shared" in name)
            and name.removesuffix(".weight") in there
        }


@dataclass(frozen=True)
class Names:
    """Weight names of a model of ``family`` whose first ``num_blocks`` layers are blocks."""

    family: Family
    num_blocks: int

    def part(self, original: str) -> str:
        """Return the part that has a weight: ``embedding``, ``blocks.3`` or ``head``."""
        prefix = f"{self.family.layers}."
        if original.startswith(prefix):
            index = int(original.removeprefix(prefix).partition(".")[0])
            return block_name(index) if index < self.num_blocks else HEAD
        return EMBEDDING if original.startswith(self.family.embedding) else HEAD

    def to_ours(self, original: str) -> str:
        """Return the weight's name in the split model."""
        part = self.part(original)
        return f"{part}{_ORIGINAL}{original.removeprefix(self._stem(part))}"

    def to_original(self, ours: str) -> str:
        """Invert ``to_ours``."""
        part, _, rest = ours.partition(_ORIGINAL)
        return f"{self._stem(part)}{rest}"

    def _stem(self, part: str) -> str:
        """Return the common prefix of the part's original names."""
        if part in (EMBEDDING, HEAD):
            return ""
        return f"{self.family.layers}.{part.rpartition('.')[2]}."


def _encoder(
    base: str, path: str = "encoder.layer", sizes: Sizes = ("num_hidden_layers", "hidden_size")
) -> Family:
    embedding = (f"{base}.embeddings.", f"{base}.embeddings_project.")
    return Family(
        f"{base}.{path}", embedding, sizes, OF_LABELS, layers.EncoderEmbedding, layers.LayerBlock
    )


DECODERS = (  # each has a test
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam"),
    *("cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
    *("diffllama", "doge", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe"),
    *("flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe"),
    *("glm4_moe_lite", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe"),
    *("granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jamba", "kimi_linear"),
    *("kolibri1", "laguna", "lfm2", "lfm2_moe", "llama", "mellum", "mimo_v2_flash", "minicpm3"),
    *("minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral"),
    *("mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi", "phi3"),
    *("phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"),
    *("qwen3_next", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma"),
    "youtu",
)
UNFIT = {  # why other families with a list of layers cannot be taken apart
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), "each layer has an embedding of token ids"),
    "deepseek_v4": "token ids choose its first layers' experts",
    **dict.fromkeys(("glm_moe_dsa", "hy_v4"), "a layer passes on more than an activation"),
    "hrm_text": "its layers are applied repeatedly",
    "nanochat": "it normalises its input, so each part would",
}
_DECODER = Family(
    "model.layers",
    ("model.embed_tokens.",),
    ("num_hidden_layers", "hidden_size"),
    {"causal": heads.CausalHead},
    layers.DecoderEmbedding,
    layers.DecoderBlock,
    twins=("model.embed_tokens.weight", "lm_head.weight"),
)
_BART = Family(
    "model.encoder.layers",
    ("model.encoder.",),
    ("encoder_layers", "d_model"),
    {"decoder": heads.Seq2SeqHead},
    layers.Seq2SeqEmbedding,
    layers.LayerBlock,
    dict.fromkeys(("lm_head.weight", "model.shared.weight"), "model.decoder.embed_tokens.weight"),
    ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
)
FAMILIES: Mapping[str, Family] = {
    "bert": _encoder("bert"),
    **dict.fromkeys(layers.LIKE_ROBERTA, _encoder("roberta")),
    "electra": _encoder("electra"),
    "distilbert": _encoder("distilbert", "transformer.layer", ("n_layers", "dim")),
    "gpt2": Family(
        "transformer.h",
        ("transformer.wte.", "transformer.wpe."),
        ("n_layer", "n_embd"),
        {"causal": heads.GPT2Head},
        layers.GPT2Embedding,
        layers.GPT2Block,
        twins=("transformer.wte.weight", "lm_head.weight"),
    ),
    "bart": _BART,
    "marian": _BART,
    "t5": Family(
        "encoder.block",
        ("encoder.embed_tokens.",),
        ("num_layers", "d_model"),
        {"decoder": heads.T5Head},
        layers.T5Embedding,
        layers.T5Block,
        dict.fromkeys(("lm_head.weight", "shared.weight"), "decoder.embed_tokens.weight"),
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    ),
    "eurobert": replace(_DECODER, heads=OF_LABELS, twins=None),
    "modernbert": replace(_encoder("model", "layers"), block=layers.DecoderBlock),
    **dict.fromkeys(DECODERS, _DECODER),
    "gpt_neox": replace(
        _DECODER,
        layers="gpt_neox.layers",
        embedding=("gpt_neox.embed_in.",),
        twins=("gpt_neox.embed_in.weight", "lm_head.weight"),
    ),
}
