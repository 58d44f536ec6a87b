"""Exported models and tokenisers give the same results when transformers loads them."""

from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
import torch
import transformers
from datasets import Dataset
from federated import TINY, grid_of, train, weights
from full_disk import full_disk
from huggingface import LABELS, ONE_OF_EACH, VOCABULARY, batch_for, folder, own_loss, spec_of
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers
from trained import trained

from collapipe import config
from collapipe.cli.trained.export import export, export_run, export_tokenizer
from collapipe.cli.trained.predict import predict_texts
from collapipe.errors import ConfigError
from collapipe.models.dropout import DropoutKey
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.split import ModelSpec, SplitModel
from collapipe.runs.folder import RunFolder
from collapipe.runs.model import initial_model
from collapipe.runs.rows import build_tokenizer
from collapipe.tasks.causal_lm import CausalLM
from collapipe.tasks.classification import Classification
from collapipe.tasks.dates import Dates
from collapipe.tasks.ner import NamedEntities
from collapipe.tasks.task import Task
from collapipe.text.tokenizer import SpecialTokens, Tokenizer

NAMES = tuple(f"kind {number}" for number in range(LABELS))
TEXTS = ["A hen, two owls.", "Noël </s>  slept"]


def perturbed(spec: HuggingFaceSpec) -> SplitModel:
    """A model with changed weights, as after training: copies of a tied weight differ."""
    torch.manual_seed(4)
    model = SplitModel(cast(ModelSpec, spec), VOCABULARY)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model.eval()


def loaded(spec: HuggingFaceSpec, path: Path) -> Any:
    """The model in ``path``, loaded by transformers."""
    return getattr(transformers, spec.class_name).from_pretrained(path)


@pytest.mark.parametrize(("name", "head"), ONE_OF_EACH)
def test_the_exported_model_computes_the_same(tmp_path: Path, name: str, head: str) -> None:
    """This also holds if embeddings that were tied at first differ after training."""
    spec, batch = spec_of(tmp_path, name, head), batch_for(head)
    model = perturbed(spec)
    export(spec, VOCABULARY, NAMES, model.state_dict(), tmp_path / "out")
    whole = loaded(spec, tmp_path / "out").eval()
    expected = model.loss(batch, DropoutKey(0, 0, 0)) / batch.num_targets
    with torch.no_grad():
        assert own_loss(head, whole, batch).item() == pytest.approx(expected.item(), abs=1e-5)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize(("name", "head"), ONE_OF_EACH)
def test_a_model_loaded_from_an_export_has_the_same_bits(
    tmp_path: Path, name: str, head: str
) -> None:
    """All weights and the loss are bitwise equal."""
    spec = spec_of(tmp_path, name, head)
    model = perturbed(spec)
    with torch.no_grad():
        for (
            ours,
            twin,
        ) in spec.untied().items():  # otherwise the exported configuration would differ
            model.get_parameter(ours).copy_(model.get_parameter(twin))
    export(spec, VOCABULARY, NAMES, model.state_dict(), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors").keys()
    for pair in spec.untied().items():  # only one of two equal weights is written
        assert sum(spec.names.to_original(ours) in written for ours in pair) == 1
    again = HuggingFaceSpec(str(tmp_path / "out"), None, spec.num_blocks, head, pretrained=True)
    restored = SplitModel(cast(ModelSpec, again), VOCABULARY).eval()
    original = {again.names.to_original(ours): w for ours, w in restored.state_dict().items()}
    for ours, weight in model.state_dict().items():
        assert torch.equal(original[spec.names.to_original(ours)], weight), ours
    batch, key = batch_for(head), DropoutKey(0, 0, 0)
    assert torch.equal(restored.loss(batch, key), model.loss(batch, key))


def test_t5s_shared_embedding_is_loaded_if_the_output_layer_is_separate(tmp_path: Path) -> None:
    """T5's files contain the embedding of encoder and decoder once, with the name ``shared``."""
    spec = spec_of(tmp_path, "t5-gated", "decoder")
    values = {spec.names.to_original(k): w for k, w in perturbed(spec).state_dict().items()}
    values["shared.weight"] = values.pop("decoder.embed_tokens.weight")
    del values["encoder.embed_tokens.weight"]
    save_file(values, tmp_path / "t5-gated" / "model.safetensors", {"format": "pt"})
    again = HuggingFaceSpec(spec.name, pretrained=True)
    restored = SplitModel(cast(ModelSpec, again), VOCABULARY).state_dict()
    for part in ("embedding.original.encoder", "head.original.decoder"):
        assert torch.equal(restored[f"{part}.embed_tokens.weight"], values["shared.weight"])
    assert torch.equal(restored["head.original.lm_head.weight"], values["lm_head.weight"])


def task_for(head: str) -> Task:
    """A task with the targets of ``head``."""
    if head == "decoder":
        return Dates(vocabulary=400, max_length=40, train_rows=9, validation_rows=9, test_rows=9)
    kind = {"tokens": NamedEntities, "pooled": Classification, "causal": CausalLM}[head]
    return kind(None, True, 400, 40)


def assert_same_ids(path: Path, task: Task, tokenizer: Tokenizer) -> Any:
    """Assert that ``AutoTokenizer`` loads a tokeniser with the task's ids, special tokens included.

    Returns this tokeniser.
    """
    words = transformers.AutoTokenizer.from_pretrained(path)
    if isinstance(task, NamedEntities):  # tagging takes texts split into words
        found = words([text.split() for text in TEXTS], is_split_into_words=True)
    else:
        found = words(TEXTS)
    batch = task.inputs(TEXTS, tokenizer).batch(range(len(TEXTS)))
    expected = [row[mask].tolist() for row, mask in zip(batch.inputs, batch.mask, strict=True)]
    assert found.input_ids == expected
    return words


@pytest.mark.parametrize(("name", "head"), ONE_OF_EACH)
def test_the_exported_tokeniser_gives_the_same_ids(tmp_path: Path, name: str, head: str) -> None:
    """The configuration of the model's family in the same folder must not change the ids."""
    spec, task = spec_of(tmp_path, name, head), task_for(head)
    text = TEXTS[:1]
    rows = Dataset.from_dict(
        {"tokens": [text[0].split()], "text": text, "source": text, "target": text}
    )
    tokenizer = trained(task, rows, NAMES)
    model = SplitModel(cast(ModelSpec, spec), tokenizer.vocabulary)
    export(spec, tokenizer.vocabulary, NAMES, model.state_dict(), tmp_path / "out")
    export_tokenizer(tokenizer, head, 7, tmp_path / "out")
    words = assert_same_ids(tmp_path / "out", task, tokenizer)
    assert len(words(TEXTS[0], truncation=True).input_ids) == 7
    marks = (words.pad_token_id, words.eos_token_id)
    assert marks == (tokenizer.vocabulary.pad, tokenizer.vocabulary.eos)


def test_a_pretrained_tokeniser_keeps_special_tokens_but_not_its_limits(tmp_path: Path) -> None:
    """Like BERT's, the tokeniser's file sets padding and truncation; the export replaces both."""
    known = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "hen", "owl"]
    pieces = models.WordPiece({word: i for i, word in enumerate(known)}, unk_token="[UNK]")
    whole = tokenizers.Tokenizer(pieces)
    whole.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    whole.enable_truncation(2)
    whole.enable_padding(length=9)
    tokenizer = Tokenizer(whole.to_str(), SpecialTokens("[PAD]", "[CLS]", "[SEP]"))
    out = folder(tmp_path, "bert")
    export_tokenizer(tokenizer, "pooled", 8, out)
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert words(["hen owl fox"]).input_ids == [[1, 5, 6, 3, 2]]
    assert len(words("hen " * 9, truncation=True).input_ids) == 8
    names = (words.cls_token, words.sep_token, words.unk_token, words.mask_token, words.pad_token)
    assert names == ("[CLS]", "[SEP]", "[UNK]", "[MASK]", "[PAD]")


@pytest.mark.parametrize("family", ["bert", "distilbert"])  # DistilBERT takes no token types
def test_a_transformers_pipeline_answers_like_the_run(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both answer plain texts with names of labels; the weights are random, not trained."""
    run_dir, out = tmp_path / "run", str(tmp_path / "out")
    overrides = ["task=classification", "data=synthetic", "model=huggingface", "model.head=pooled"]
    overrides += [f"model.name={folder(tmp_path, family)}", f"hydra.run.dir={run_dir}"]
    settings = config.load_overrides([*overrides, "task.max_length=18", "task.vocabulary=300"])
    rows = settings.task.splits(settings.seed).train
    tokenizer, run = build_tokenizer(settings), RunFolder(run_dir)
    model = initial_model(settings, tokenizer)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    run.write_config(settings)
    run.write_tokenizer(tokenizer)
    run.write_base({})
    run.write_weights(model.state_dict())
    export_run(run_dir, Path(out), ())
    texts = rows["text"][:20]
    capsys.readouterr()
    predict_texts(run_dir, [texts], ())
    predicted = capsys.readouterr().out.splitlines()
    answers = transformers.pipeline("text-classification", out)(texts, truncation=True)
    assert [answer["label"] for answer in answers] == predicted
    assert len(set(predicted)) > 1


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Assert that the names and the values are equal."""
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_a_run_is_trained_predicts_and_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exported model, decoded greedily, answers like ``collapipe predict``."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    options = [option for option in TINY if not option.startswith("model.")]
    name = folder(tmp_path, "bart")
    overrides = [*options, "model=huggingface", f"model.name={name}", "task.max_length=18"]
    overrides.append("federation.rounds=1")
    settled = [*overrides, f"hydra.run.dir={run_dir}"]
    settings = config.load_overrides(settled)
    train(grid_of(settings), settings)
    capsys.readouterr()
    predict_texts(run_dir, [["Montag, 14:05"]], ())
    predicted = capsys.readouterr().out.rstrip("\n")
    with full_disk(), pytest.raises(ConfigError, match="make room or name another folder"):
        export_run(run_dir, out, ())
    assert not out.exists()
    out.mkdir(mode=0o700)
    with full_disk(), pytest.raises(ConfigError, match="make room or name another folder"):
        export_run(run_dir, out, ())
    export_run(run_dir, out, ())
    words = transformers.AutoTokenizer.from_pretrained(out)
    how = capsys.readouterr().out.rpartition("load it with ")[2]
    whole = eval(how, {"transformers": transformers})
    ids = torch.tensor([words("Montag, 14:05").input_ids])
    answer = whole.generate(ids, max_new_tokens=18, do_sample=False, num_beams=1)
    assert words.decode(answer[0], skip_special_tokens=True).strip() == predicted.strip()
    at_home = [*overrides, "decoder.mode=control_unit", f"hydra.run.dir={tmp_path / 'home'}"]
    settings = config.load_overrides(at_home)
    train(grid_of(settings), settings)
    assert_same_bits(weights(run_dir), weights(tmp_path / "home"))
    assert out.stat().st_mode & 0o777 == 0o700
    names = load_file(out / "model.safetensors").keys()
    assert "model.encoder.layers.3.fc1.weight" in names
    with pytest.raises(ConfigError, match="not empty"):
        export_run(run_dir, out, ())
    with pytest.raises(ConfigError, match="--adapter: needs a run with"):
        export_run(run_dir, tmp_path / "new" / "folder", (), adapter=True)
    assert not (tmp_path / "new").exists()
    for place in (out / "config.json" / "new", Path("/proc/none/new")):
        with pytest.raises(ConfigError, match=f"^{place}: ") as caught:
            export_run(run_dir, place, ())
        assert "\n" not in str(caught.value)
