"""A tokeniser of somebody else is tried in a process of its own before it is used here: the library
may panic, which prints a backtrace, or take all memory, which ends the process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from collapipe.errors import ConfigError, one_line

_MOST_BYTES, _MOST_MEMORY, _SECONDS = 2**27, 2**32, 60
_MOST_PROBES, _LONGEST_PROBE = 2000, 1000
_PROBES = ["", " ", "\n", "A hen, 7 eggs: naïve?", "".join(map(chr, range(1, 1024))), "母鸡 🐔 ﷺ"]
_TRY = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({_MOST_MEMORY}, {_MOST_MEMORY}))
import tokenizers
text, probes = json.load(sys.stdin)
tokenizer = tokenizers.Tokenizer.from_str(text)
tokenizer.no_padding(), tokenizer.no_truncation()
for probe in probes:
    ids = tokenizer.encode(probe, add_special_tokens=False).ids
    tokenizer.decode(ids)
    if len(ids) > 100 * len(probe) + 100:
        sys.exit(f"{{len(ids)}} tokens for a text of {{len(probe)}} characters")
"""


def check_tokenizer(json_text: str) -> None:
    """Raise ``ConfigError`` for a tokeniser's JSON that the library cannot read, or that fails on
    common texts or on those that its own rules name."""
    if len(json_text) > _MOST_BYTES:
        raise ConfigError(f"a tokeniser of {len(json_text)} characters, at most {_MOST_BYTES}")
    try:
        tree = json.loads(json_text)
        rules = [tree[part] for part in ("normalizer", "pre_tokenizer", "decoder") if part in tree]
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"not a tokeniser's JSON ({one_line(error)})") from error
    probes = [*_PROBES, *_texts(rules)][:_MOST_PROBES]
    try:
        tried = subprocess.run(  # noqa: S603, our own program
            [sys.executable, "-I", "-c", _TRY],
            input=json.dumps([json_text, probes]),
            env={**os.environ, "RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"},
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"a tokeniser that takes longer than {_SECONDS} s") from error
    if tried.returncode:
        why = (tried.stderr.strip() or f"status {tried.returncode}").splitlines()[-1]
        raise ConfigError(f"not a tokeniser that works ({one_line(why)})")


def _texts(rules: Any) -> Iterator[str]:
    """What a tokeniser's rules name: a rule may fail on that alone."""
    if isinstance(rules, dict | list):
        for rule in rules.values() if isinstance(rules, dict) else rules:
            yield from _texts(rule)
    elif isinstance(rules, str):
        yield rules[:_LONGEST_PROBE]
