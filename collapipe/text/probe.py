"""``python -I probe.py``: try an untrusted tokeniser in a separate process.

The library may panic or take all memory, so the caller must be able to end the process. Standard
input is a tokeniser's JSON, or with the argument ``packed`` a text of ``Tokenizer.pack``. The last
line of standard error describes the problem. This file imports nothing of CollaPipe.
"""

import json
import resource
import sys
from collections.abc import Iterator
from typing import Any

import tokenizers

MOST_MEMORY = 2**32
_MOST_PROBES, _LONGEST_PROBE = 2000, 1000
_PROBES = ["", " ", "\n", "A hen, 7 eggs: naïve?", "".join(map(chr, range(1, 1024))), "母鸡 🐔 ﷺ"]
_RULES = "normalizer", "pre_tokenizer", "decoder"


def main() -> None:
    """Exit with status 0 if the tokeniser works on common texts and on texts in its rules."""
    if sys.platform == "linux":  # macOS refuses this limit
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    text = sys.stdin.read()
    if sys.argv[1:] == ["packed"]:
        packed = json.loads(text)
        text, labels = packed["tokenizer"], packed["labels"]
        if not (isinstance(text, str) and all(isinstance(label, str) for label in labels)):
            sys.exit("a tokeniser or a label that is no text")
        if not all(isinstance(token, str) for token in packed["marks"].values()):
            sys.exit("a special token that is no text")
    tree = json.loads(text)
    probes = [*_PROBES, *_texts([tree[part] for part in _RULES if part in tree])]
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for probe in probes[:_MOST_PROBES]:
        ids = tokenizer.encode(probe, add_special_tokens=False).ids
        tokenizer.decode(ids)
        if len(ids) > 100 * len(probe) + 100:
            sys.exit(f"{len(ids)} tokens for a text of {len(probe)} characters")


def _texts(rules: Any) -> Iterator[str]:
    """Yield the texts in a tokeniser's rules: a rule may fail only on such a text."""
    if isinstance(rules, dict | list):
        for rule in rules.values() if isinstance(rules, dict) else rules:
            yield from _texts(rule)
    elif isinstance(rules, str):
        yield rules[:_LONGEST_PROBE]


if __name__ == "__main__":
    main()
