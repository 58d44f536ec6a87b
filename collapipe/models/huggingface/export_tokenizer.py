"""A run's tokeniser as transformers has it, with the marks that the task puts around a text."""

from pathlib import Path

import tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from collapipe.text.tokenizer import Tokenizer

# Where marks stand: what the tasks put around an input for each kind of head.
_TEMPLATES = {
    "tokens": "{bos} $A {eos}",
    "pooled": "{bos} $A {eos}",
    "causal": "{eos} $A",
    "decoder": "$A {eos}",
}
# What else a pretrained tokeniser may have, under one of the names that families give it.
_OTHERS = {"mask_token": ("[MASK]", "<mask>"), "unk_token": ("[UNK]", "<unk>")}


def export_tokenizer(tokenizer: Tokenizer, head: str, max_length: int, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; ``AutoTokenizer`` reads them.

    A text's ids there are those of the run, marks included; ``truncation=True`` cuts as the run
    did, to ``max_length``.
    """
    words, marks = tokenizers.Tokenizer.from_str(tokenizer.json_text), tokenizer.special_tokens
    ids, template = words.get_vocab(), _TEMPLATES[head].format(bos=marks.bos, eos=marks.eos)
    words.post_processor = TemplateProcessing(
        single=template,
        special_tokens=[(mark, ids[mark]) for mark in dict.fromkeys((marks.bos, marks.eos))],
    )
    named = {kind: name for kind, names in _OTHERS.items() for name in names if name in ids}
    if head in ("tokens", "pooled"):
        named |= {"cls_token": marks.bos, "sep_token": marks.eos}
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=marks.pad,
        bos_token=marks.bos,
        eos_token=marks.eos,
        split_special_tokens=True,  # a typed "</s>" is text, as in the run
        model_max_length=max_length,
        **named,
    ).save_pretrained(folder)
