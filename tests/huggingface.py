"""Small models of every supported family, and the original transformers models to compare with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LoraSpec, merge_adapters
from collapipe.models.split import SplitModel, build_empty
from collapipe.tensors import IGNORED, Batch
from collapipe.text.vocabulary import Vocabulary

LABELS = 5
VOCABULARY = Vocabulary(size=23, pad=0, bos=1, eos=2, num_labels=LABELS)
_ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
}
_DECODER = {
    "d_model": 16,
    "encoder_layers": 4,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 20,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "scale_embedding": True,
}
_T5 = {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 4, "num_decoder_layers": 2}
_T5 |= {"num_heads": 2, "relative_attention_num_buckets": 10, "relative_attention_max_distance": 9}
_T5 |= {"decoder_start_token_id": 0}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_ROTARY = {**_ENCODER, "num_key_value_heads": 1, "attention_dropout": 0.1}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "bert": _ENCODER,
    "roberta": _ENCODER | {"type_vocab_size": 1},
    "xlm-roberta": _ENCODER | {"type_vocab_size": 1},
    "camembert": _ENCODER | {"type_vocab_size": 1},
    "electra": _ENCODER | {"embedding_size": 12},
    "distilbert": {"dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 24},
    "eurobert": _ROTARY,
    "modernbert": _ENCODER | {"local_attention": 4, "attention_dropout": 0.1, "mlp_dropout": 0.1},
    "gpt2": {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 20},
    "llama": _ROTARY,
    "qwen2": _ROTARY
    | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "rope_theta": 99.0},
    "bart": _DECODER,
    "marian": _DECODER | {"decoder_start_token_id": 0},
    "t5": _T5,
}
# Configurations that change the layout of weights: name → family and changed options.
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{family: (family, {}) for family in SIZES},
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "marian-apart": ("marian", {"share_encoder_decoder_embeddings": False}),
    "t5-gated": ("t5", _GATED),
    "t5-wide": ("t5", {"relative_attention_num_buckets": 32}),  # its bias table fills four rows
}
CASES = [
    *[(name, head) for name in list(SIZES)[:8] for head in ("tokens", "pooled")],
    *[(name, "causal") for name in ("gpt2", "llama", "qwen2", "llama-tied")],
    *[
        (name, "decoder")
        for name in ("bart", "marian", "marian-apart", "t5", "t5-gated", "t5-wide")
    ],
]
_POOLED = "roberta", "distilbert"
_SAME_DESIGN = "xlm-roberta", "camembert", "qwen2", "marian"  # built like another family


def _stands_for_others(name: str, head: str) -> bool:
    return name in SIZES.keys() - _SAME_DESIGN and (name in _POOLED) == (head == "pooled")


# For properties that depend on the family: a case per family; `make test-thorough` adds the others.
ONE_OF_EACH = [
    pytest.param(*case, marks=() if _stands_for_others(*case) else pytest.mark.thorough)
    for case in CASES
]


def folder(tmp_path: Path, name: str, **changes: Any) -> Path:
    """Make a folder with the ``config.json`` of a small model."""
    family, differing = VARIANTS[name]
    path = tmp_path / name
    path.mkdir(exist_ok=True)
    tree = {
        "model_type": family,
        "vocab_size": 23,
        "pad_token_id": 0,
        **SIZES[family],
        **differing,
        **changes,
    }
    kept = {key: value for key, value in tree.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))
    return path


def spec_of(tmp_path: Path, name: str, head: str, **changes: Any) -> HuggingFaceSpec:
    """Return the options of such a model; three of a causal model's four layers are blocks."""
    blocks = 3 if head == "causal" else None
    return HuggingFaceSpec(str(folder(tmp_path, name, **changes)), None, blocks, head)


def without_dropout(family: str) -> dict[str, float]:
    """Return all dropout probabilities of a family's ``config.json``, set to 0."""
    config = transformers.CONFIG_MAPPING[family]()
    names = [key for key in config.to_dict() if "drop" in key or key.endswith("_pdrop")]
    return dict.fromkeys(names, 0.0)


def untouched(spec: HuggingFaceSpec, model: SplitModel) -> tuple[Any, dict[str, str]]:
    """Return the original transformers model with the split model's weights, and each weight's name
    in it.

    If the original shares a weight that the split model holds twice, both places get the head's
    values.
    """
    config = spec.run_config(VOCABULARY)
    whole = getattr(transformers, spec.class_name).from_config(config, attn_implementation="eager")
    whole = whole.to(torch.float64)
    if hasattr(whole.base_model, "rotary_emb"):
        whole.base_model.rotary_emb.float()  # no weights: always built in float32
    if config.model_type == "t5":  # shared even if the output layer has its own weights
        whole.set_input_embeddings(whole.shared)
    places = {ours: spec.names.to_original(ours) for ours in model.state_dict()}
    values = {places[ours]: weight for ours, weight in model.state_dict().items()}
    values |= {twin: values[name] for twin, name in spec.copies(VOCABULARY).items()}
    whole.load_state_dict(values, strict=False)
    missing = whole.state_dict().keys() - values.keys()
    assert all("embed_positions" in name for name in missing), missing  # Marian's constants
    return whole, places


def merged(spec: LoraSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of ``spec.base`` with the adapters in ``weights`` merged."""
    model = build_empty(lambda: SplitModel(spec, VOCABULARY), dict(weights))
    merge_adapters(model)
    return model.state_dict()


def batch_for(head: str, num_samples: int = 5) -> Batch:
    """Return inputs of different lengths, and targets for this head."""
    generator = torch.Generator().manual_seed(11)
    lengths = torch.tensor([4, 7, 1, 5, 2])[:num_samples, None]
    mask = torch.arange(7) < lengths
    inputs = torch.randint(3, VOCABULARY.size, (num_samples, 7), generator=generator)
    inputs = inputs.masked_fill(~mask, VOCABULARY.pad)
    if head == "tokens":
        targets = torch.randint(0, LABELS, (num_samples, 7), generator=generator)
        targets[1, -1] = IGNORED  # a token without a label, at the end of the longest
        return Batch(inputs, mask, targets.masked_fill(~mask, IGNORED))
    if head == "pooled":
        return Batch(inputs, mask, torch.randint(0, LABELS, (num_samples, 1), generator=generator))
    if head == "causal":
        following = torch.cat((inputs, inputs.new_zeros(num_samples, 1)), 1)[:, 1:]
        last = torch.arange(7) >= lengths - 1
        return Batch(inputs, mask, following.masked_fill(last, IGNORED))
    targets = torch.randint(3, VOCABULARY.size, (num_samples, 6), generator=generator)
    real = torch.arange(6) < torch.tensor([6, 2, 3, 1, 5])[:num_samples, None]
    return Batch(inputs, mask, targets.masked_fill(~real, IGNORED))


def own_loss(head: str, whole: Any, batch: Batch) -> Tensor:
    """Return the loss that transformers computes, a mean over target tokens."""
    labels = batch.targets
    if head == "causal":  # transformers shifts the labels
        labels = batch.inputs.masked_fill(~batch.mask, IGNORED)
    if head == "pooled":
        labels = labels[:, 0]
    loss: Tensor = whole(batch.inputs, attention_mask=batch.mask.long(), labels=labels).loss
    return loss


class InFloat64(TorchFunctionMode):
    """Keep float64 where transformers computes norms and softmax in float32.

    Such rounding in both models would hide the differences that a test looks for.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch's protocol for modes."""
        kwargs = dict(kwargs or {})
        double = len(args) > 0 and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if double and func is Tensor.float:
            return args[0]
        if double and func is Tensor.to and torch.float32 in (*args, kwargs.get("dtype")):
            return args[0]
        if double and func is torch.nn.functional.softmax:
            kwargs.pop("dtype", None)
        return func(*args, **kwargs)
