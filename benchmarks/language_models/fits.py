"""Memory of all blocks with LoRA, and the number of devices that hold them, by model and kept
weights.

Computed from sizes, as in ``collapipe plan``, for m = b and segments that recompute; nothing is
trained.
"""

import json
from argparse import ArgumentParser, Namespace

from benchmarks.arguments import at_least
from benchmarks.devices.sides import about, save
from collapipe.models.cost import end_bytes, measure_cost
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LoraSpec
from collapipe.text.vocabulary import Vocabulary

_KEPT = {
    "float32": {"kept": "float32"},
    "bfloat16": {"kept": "bfloat16"},
    "int8": {"kept": "bfloat16", "quantization": "int8"},
    "nf4": {"kept": "bfloat16", "quantization": "nf4"},
}
_MODELS = {  # family, vocabulary, blocks, width, feed-forward width, heads, heads of keys
    "SmolLM2-135M": ("llama", 49_152, 30, 576, 1536, 9, 3),
    "Qwen2.5-0.5B": ("qwen2", 151_936, 24, 896, 4864, 14, 2),
    "Llama-3.2-1B": ("llama", 128_256, 16, 2048, 8192, 32, 8),
    "Qwen2.5-1.5B": ("qwen2", 151_936, 28, 1536, 8960, 12, 2),
    "Qwen2.5-3B": ("qwen2", 151_936, 36, 2048, 11_008, 16, 2),
    "Qwen2.5-7B": ("qwen2", 152_064, 28, 3584, 18_944, 28, 4),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add arguments for a device's memory and a batch."""
    parser.add_argument("--memory", type=float, default=4e9, help="of each device, in bytes")
    parser.add_argument("--batch", type=at_least(1), default=4)
    parser.add_argument("--tokens", type=at_least(1), default=256)


def main(arguments: Namespace) -> None:
    rows = []
    for name, sizes in _MODELS.items():
        base = _spec(*sizes)
        row: dict[str, object] = {"model": name, "blocks": base.num_blocks}
        for how, options in _KEPT.items():
            spec = LoraSpec(base, 8, 16.0, **options)
            cost = measure_cost(spec, arguments.tokens, arguments.batch, recompute=True)
            each = cost.segment_needs(2, 1) - cost.segment_needs(1, 1)
            most = (arguments.memory - cost.segment_bytes) // each
            devices = -(-base.num_blocks // int(most))
            row[how] = {"bytes": cost.segment_needs(base.num_blocks, 1), "devices": devices}
        row["ends"] = sum(end_bytes(spec, Vocabulary(sizes[1], pad=0, bos=0, eos=0)))
        print(json.dumps(row), flush=True)
        rows.append(row)
    save(arguments.output, "fits", {"about": about(arguments), "rows": rows})


def _spec(
    family: str, vocabulary: int, blocks: int, width: int, inner: int, heads: int, keys: int
) -> HuggingFaceSpec:
    config = {
        "vocab_size": vocabulary,
        "num_hidden_layers": blocks,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "tie_word_embeddings": True,
    }
    return HuggingFaceSpec(None, family, blocks, config=config)
