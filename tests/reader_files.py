"""Small synthetic files that the pages name but do not show."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import transformers
from chats import PLAIN
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from tokenizers import ByteLevelBPETokenizer

_WORDS = [
    "a",
    "fine",
    "dull",
    "film",
    "of",
    "the",
    "year",
    "with",
    "a",
    "plot",
    "that",
    "one",
    "sees",
    "again",
    "and",
    "forgets",
]
_ROWS = 120
_SIZE = {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2}
_BERT = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
_BERT |= {"intermediate_size": 16, "max_position_embeddings": 512, "pad_token_id": 0}
_BART = {"d_model": 16, "encoder_layers": 4, "decoder_layers": 1, "encoder_attention_heads": 2}
_BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}


def text(number: int) -> str:
    return " ".join(_WORDS[(number * step) % len(_WORDS)] for step in range(1, 6 + number % 4))


def table(file: Path, rows: Iterable[Mapping[str, object]], separator: str) -> None:
    """Write a CSV or TSV file; no cell may contain the separator."""
    rows = [*rows]
    cells = [[*rows[0]], *([*map(str, row.values())] for row in rows)]
    file.write_text("".join(f"{separator.join(each)}\n" for each in cells))


def json_lines(file: Path, rows: Iterable[Mapping[str, object]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def make_files(folder: Path) -> None:
    """Write rows, and what ``FOLDER`` and ``FOLDER_OR_HUB_ID`` stand for."""
    texts = [text(number) for number in range(_ROWS)]
    labels = ["good" if number % 3 else "bad" for number in range(_ROWS)]
    tags = [["B-X", "I-X", *["O"] * (len(each.split()) - 2)] for each in texts]
    rated = [*zip(texts, labels, strict=True)]
    table(folder / "rows.csv", ({"text": t, "label": y} for t, y in rated), ",")
    for name in ("train.tsv", "test.tsv"):
        table(
            folder / name,
            ({"text": t, "label": y, "user": n % 3} for n, (t, y) in enumerate(rated)),
            "\t",
        )
    reviews = ({"review": t, "sentiment": y} for t, y in rated)
    table(folder / "reviews.csv", reviews, ",")
    for name, columns in {"sentences": ("words", "tags"), "tagged": ("tokens", "ner_tags")}.items():
        tagged = (
            dict(zip(columns, (t.split(), g), strict=True))
            for t, g in zip(texts, tags, strict=True)
        )
        json_lines(folder / f"{name}.jsonl", tagged)
    for name in ("notes.txt", "inputs.txt", "public.txt"):
        (folder / name).write_text("\n".join([*texts[:20], ""]))
    pairs = [{"de": each, "en": each.upper()} for each in texts]
    json_lines(folder / "pairs.jsonl", ({"translation": each} for each in pairs))
    json_lines(folder / "other.jsonl", ({"source": p["de"], "target": p["en"]} for p in pairs[:5]))
    chats = ({"prompt": t, "completion": y} for t, y in rated)
    json_lines(folder / "chats.jsonl", chats)
    (folder / "template.jinja").write_text(PLAIN)
    hub_folders(folder, texts, pairs)
    (root := folder / "FOLDER").mkdir()
    for split in ("train", "valid", "test"):
        rows = (f"{t}\t{int(y == 'good')}\n" for t, y in rated)
        (root / f"{split}.tsv").write_text("".join(rows))
        (root / f"{split}.txt").write_text("\n".join([*texts, ""]))
        (root / f"{split}.de").write_text("\n".join([*texts, ""]))
        (root / f"{split}.en").write_text("\n".join([*texts, ""]).upper())
        (root / f"{split}.fr").write_text("\n".join([*texts, ""]).upper())
        lines = (
            "\n".join(map(" ".join, zip(t.split(), g, strict=True)))
            for t, g in zip(texts, tags, strict=True)
        )
        (root / f"{split}.conll").write_text("\n\n".join(lines) + "\n")
    (root / "labels.txt").write_text("bad\ngood\n")
    models(root, folder / "FOLDER_OR_HUB_ID", texts)


def hub_folders(folder: Path, texts: list[str], pairs: list[dict[str, str]]) -> None:
    """Make folders with the names of data sets of the hub, to be loaded instead."""
    rotten = folder / "cornell-movie-review-data/rotten_tomatoes"
    rotten.mkdir(parents=True)
    table(rotten / "train.csv", ({"text": t, "label": n % 2} for n, t in enumerate(texts)), ",")
    (wmt := folder / "wmt16").mkdir()
    json_lines(wmt / "train.jsonl", ({"translation": each} for each in pairs))
    names = "---\nconfigs:\n- config_name: de-en\n  data_files: train.jsonl\n---\n"
    (wmt / "README.md").write_text(names)
    (named := folder / "named").mkdir()
    tags = Sequence(ClassLabel(names=["O", "B-X"]))
    features = Features({"tokens": Sequence(Value("string")), "ner_tags": tags})
    rows = {"tokens": [["a", "b"]], "ner_tags": [[0, 1]]}
    Dataset.from_dict(rows, features).to_parquet(named / "train.parquet")


def models(encoder: Path, decoder: Path, texts: list[str]) -> None:
    """Save a BERT and a BART with random weights, and a tokeniser."""
    made = ByteLevelBPETokenizer()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    made.train_from_iterator(texts, 300, special_tokens=special)
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, **names, cls_token="<s>", sep_token="</s>"
    )
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer)}
    bert = transformers.BertModel(transformers.BertConfig(**size, **_BERT))
    config = transformers.BartConfig(**size, **_BART, **_SIZE, decoder_start_token_id=2)
    for folder, model in {
        encoder: bert,
        decoder: transformers.BartForConditionalGeneration(config),
    }.items():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
