"""Invalid model options fail with a one-line error that lists the families; nothing is
unpickled."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from huggingface import (
    VOCABULARY,
    InFloat64,
    batch_for,
    folder,
    own_loss,
    spec_of,
    untouched,
    without_dropout,
)

from collapipe.config import load_overrides
from collapipe.errors import ConfigError
from collapipe.models.dropout import DropoutKey
from collapipe.models.huggingface.families import DECODERS, FAMILIES
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.split import Head, ModelSpec, SplitModel
from collapipe.tensors import IGNORED
from server_app import training


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        HuggingFaceSpec(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"model_type": "mamba"}, {}, r"model_type mamba cannot be taken apart \(its parts"),
        ({"model_type": "nanochat"}, {}, r"nanochat cannot be taken apart \(it normalises"),
        ({"model_type": "gemma3"}, {}, r"gemma3 cannot be taken apart \(it reads more than text"),
        ({"model_type": "bart2"}, {}, r"bart2 cannot be taken apart \(transformers .* not know"),
        ({"model_type": None}, {}, "has no model_type; set model.family"),
        ({"model_type": None}, {"family": "mamba"}, "model_type mamba cannot be taken apart"),
        ({}, {"family": "gpt2"}, "family=gpt2: .* is a bert"),
        ({"hidden_size": None}, {}, "has no hidden_size"),
        ({"num_hidden_layers": None}, {}, "has no num_hidden_layers"),
        ({"hidden_size": 17}, {}, "transformers cannot build a bert"),
        ({"num_hidden_layers": 4}, {"num_blocks": 5}, "num_blocks=5.*has 4 layers"),
        ({}, {"num_blocks": 0}, "num_blocks=0"),
        ({}, {"head": "decoder"}, "head=decoder: a bert has tokens or pooled"),
    ],
)
def test_an_invalid_model_is_refused_in_one_line_that_lists_the_families(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    path = folder(tmp_path, "bert", **changes)
    with pytest.raises(ConfigError, match=words) as caught:
        HuggingFaceSpec(str(path), **options)
    assert_one_line_with_families(caught.value)


def assert_one_line_with_families(error: ConfigError) -> None:
    """The message that users see has one line and names all families."""
    text = str(error)
    assert "\n" not in text
    assert all(family in text for family in FAMILIES.keys() - {*DECODERS})
    assert f"{len(DECODERS)} decoder-only" in text


def test_an_unsupported_family_is_named_in_the_error() -> None:
    with pytest.raises(ConfigError, match=r"^model\.family=mamba: ") as refused:
        HuggingFaceSpec(family="mamba")
    assert_one_line_with_families(refused.value)


def test_a_name_without_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name, a missing folder, and a hub name while the hub is offline."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in (None, str(tmp_path / "missing"), "nobody/nothing"):
        with pytest.raises(ConfigError, match=r"model\.name") as caught:
            HuggingFaceSpec(name)
        assert_one_line_with_families(caught.value)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_all_layers_of_a_causal_model_are_blocks_by_default(tmp_path: Path, name: str) -> None:
    """The head is the last norm and the output layer; the loss equals the original model's loss."""
    path = folder(tmp_path, name, **without_dropout(name))
    spec = HuggingFaceSpec(str(path))
    model = SplitModel(cast(ModelSpec, spec), VOCABULARY).double()
    assert (spec.num_blocks, spec.head) == (4, "causal")
    head_layers = {name.rpartition(".")[0] for name in model.head.state_dict()}
    assert len(head_layers) == 2, head_layers
    with torch.no_grad():
        for ours, twin in spec.untied().items():
            model.get_parameter(ours).copy_(model.get_parameter(twin))
    batch = batch_for("causal")
    whole, _ = untouched(spec, model)
    with InFloat64():
        loss = model.loss(batch, DropoutKey(0, 0, 0))
        expected = own_loss("causal", whole, batch)
    real = int((batch.targets != IGNORED).sum())
    assert float(loss.detach()) / real == pytest.approx(float(expected.detach()), abs=1e-8)


def test_command_line_options_and_family_defaults_reach_the_spec(tmp_path: Path) -> None:
    """The defaults are all layers of the model and the first head of its family."""
    path = folder(tmp_path, "electra")
    options = ["task=ner", "data=synthetic", "model=huggingface", f"model.name={path}"]
    spec = load_overrides(options).model
    assert spec == HuggingFaceSpec(str(path), None, 4, "tokens", dtype="auto")
    assert (spec.num_blocks, spec.dim) == (4, 16)


def test_a_family_with_the_tasks_head_needs_only_another_head(tmp_path: Path) -> None:
    options = ["task=ner", "data=synthetic", "model=huggingface"]
    options.append(f"model.name={folder(tmp_path, 'electra')}")
    with pytest.raises(ConfigError, match=r"set task=classification, or model\.head=tokens$"):
        load_overrides([*options, "model.head=pooled"])
    assert load_overrides([*options, "model.head=tokens"]).model.head == "tokens"


def test_a_config_without_a_type_needs_the_family(tmp_path: Path) -> None:
    path = str(folder(tmp_path, "bert", model_type=None))
    assert HuggingFaceSpec(path, family="bert").own_config.model_type == "bert"


def test_an_encoder_may_use_fewer_blocks_than_its_configuration_has(tmp_path: Path) -> None:
    spec = HuggingFaceSpec(str(folder(tmp_path, "t5")), num_blocks=2)
    model = SplitModel(cast(ModelSpec, spec), VOCABULARY)
    assert len(model.blocks) == 2
    batch = batch_for("decoder")
    assert model.eval().encode(batch.inputs, batch.mask).shape == (5, 7, 16)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, "bert")
    torch.save({"bert.pooler.dense.bias": torch.zeros(16)}, path / "pytorch_model.bin")
    spec = HuggingFaceSpec(str(path), pretrained=True)
    with pytest.raises(ConfigError, match="cannot read weights from safetensors"):
        SplitModel(cast(ModelSpec, spec), VOCABULARY)


@pytest.mark.parametrize("index", [None, [], {"weight_map": None}, {"weight_map": {"a": 3}}])
def test_a_damaged_index_is_refused_in_one_line(pretrained: Path, index: object) -> None:
    (pretrained / "model.safetensors").unlink()
    (pretrained / "model.safetensors.index.json").write_text(json.dumps(index))
    spec = HuggingFaceSpec(str(pretrained), pretrained=True)
    with pytest.raises(ConfigError, match=r"cannot read weights from safetensors") as caught:
        spec.build_embedding(VOCABULARY)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("own", "file", "ends"),
    [
        (2, {"eos_token_id": [2, 5]}, [2, 5]),
        (2, {"eos_token_id": 2, "top_k": 9}, 2),
        ([2, 3], {}, [2, 3]),
        (None, {"eos_token_id": 5}, 5),
    ],
)
def test_the_end_token_is_read_from_the_generation_configuration(
    tmp_path: Path, own: object, file: dict[str, object], ends: object
) -> None:
    """Decoder-only models use ``generation_config.json``; encoder-decoder models use their own
    configuration."""
    for name in ("llama", "t5"):
        path = folder(tmp_path, name, eos_token_id=own)
        (path / "generation_config.json").write_text(json.dumps(file))
    assert HuggingFaceSpec(str(tmp_path / "llama")).own_config.eos_token_id == ends
    assert HuggingFaceSpec(str(tmp_path / "t5")).own_config.eos_token_id in (own, 1)


@pytest.mark.parametrize("shard", ["evil.bin", "../evil.safetensors", "evil"])
def test_an_index_that_names_a_pickle_is_refused(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch, shard: str
) -> None:
    monkeypatch.setattr(torch, "load", lambda *rest, **more: pytest.fail("unpickled"))
    weights = transformers.AutoModelForTokenClassification.from_pretrained(pretrained).state_dict()
    (pretrained / "model.safetensors").rename(pretrained.parent / "evil.safetensors")
    torch.save(weights, pretrained / "evil.bin")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, shard)}
    (pretrained / "model.safetensors.index.json").write_text(json.dumps(index))
    spec = HuggingFaceSpec(str(pretrained), pretrained=True)
    with pytest.raises(ConfigError, match=r"model\.name=.*evil"):
        spec.build_embedding(VOCABULARY)


def test_weights_may_be_in_several_files(pretrained: Path) -> None:
    spec = HuggingFaceSpec(str(pretrained), pretrained=True)
    whole = spec.build_embedding(VOCABULARY).state_dict()
    several = pretrained.parent / "several"
    model = transformers.AutoModelForTokenClassification.from_pretrained(pretrained)
    model.save_pretrained(several, max_shard_size="4KB")
    assert len(list(several.glob("*.safetensors"))) > 1
    parts = HuggingFaceSpec(str(several), pretrained=True).build_embedding(VOCABULARY).state_dict()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_a_changed_folder_is_another_model(tmp_path: Path) -> None:
    """What a process knows of a model is not used for the one that replaces it in the folder."""
    first, same = spec_of(tmp_path, "bert", "pooled"), spec_of(tmp_path, "bert", "pooled")
    changed = spec_of(tmp_path, "bert", "pooled", intermediate_size=40)
    assert first == same != changed
    assert changed.own_config.intermediate_size == 40 != first.own_config.intermediate_size
    shapes = [[*map(len, each.build_block(0).state_dict().values())] for each in (first, changed)]
    assert shapes[0] != shapes[1]


def test_a_vocabulary_of_another_size_than_the_pretrained_one_is_refused(tmp_path: Path) -> None:
    spec = HuggingFaceSpec(str(folder(tmp_path, "bert", vocab_size=9)), pretrained=True)
    with pytest.raises(ConfigError, match=r"knows 9 tokens, the run's tokeniser has 23"):
        spec.build_embedding(VOCABULARY)


@pytest.mark.parametrize(("name", "start"), [("t5", None), ("marian", 23)])
def test_a_pretrained_decoder_without_a_first_token_is_refused(
    tmp_path: Path, name: str, start: int | None
) -> None:
    """The server's first step would fail, and transformers writes such configurations."""
    made = folder(tmp_path, name, decoder_start_token_id=start)
    spec = HuggingFaceSpec(str(made), None, None, "decoder", pretrained=True)
    with pytest.raises(
        ConfigError, match=rf"has decoder_start_token_id={start}, expected one of 23"
    ):
        spec.run_config(VOCABULARY)


@pytest.mark.parametrize(
    ("name", "options", "warned"),
    [
        *(("gpt2", [], True), ("t5", [], True), ("llama", [], False)),
        *(("gpt2", ["adapter=lora"], False), ("t5", ["framework=splitfed"], True)),
    ],
)
def test_a_warning_reports_that_a_shared_embedding_is_split(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, options: list[str], warned: bool
) -> None:
    """The server warns once, unless both copies are frozen; building the model does not warn."""
    task = "dates" if name == "t5" else "causal_lm"
    path = f"model.name={folder(tmp_path, name)}"
    own = f"task={task}", "task.max_length=16", "model=huggingface", path
    settings = load_overrides([*own, *options])
    SplitModel(cast(ModelSpec, settings.model), VOCABULARY)
    training._warn(settings)
    assert sum("shares one embedding" in text for text in caplog.messages) == warned


@pytest.mark.parametrize("options", [(), ("adapter=lora", "adapter.last_blocks=1")])
def test_a_causal_model_trains_on_as_many_tokens_as_it_has_positions(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    path = folder(tmp_path, "llama", max_position_embeddings=40)
    own = "task=causal_lm", "model=huggingface", f"model.name={path}", *options
    load_overrides([*own, "task.max_length=40"])
    with pytest.raises(ConfigError, match=r"^task\.max_length=41: .* positions for 40 tokens; low"):
        load_overrides([*own, "task.max_length=41"])


@pytest.mark.parametrize(
    ("name", "head"),
    [("bert", "tokens"), ("bert", "pooled"), ("gpt2", "causal"), ("t5", "decoder")],
)
def test_the_number_of_predictions_follows_from_the_head(
    tmp_path: Path, name: str, head: str
) -> None:
    """Heads predict a label per token, a label per sample, the next token after each token, or a
    sentence."""
    model = SplitModel(cast(ModelSpec, spec_of(tmp_path, name, head)), VOCABULARY).eval()
    predicted = model.generate(batch_for(head), max_length=3)
    lengths = [len(ids) for ids in predicted]
    if head == "decoder":
        assert max(lengths) <= 3
    else:
        assert lengths == ([1] * 5 if head == "pooled" else [4, 7, 1, 5, 2])


def test_a_sentence_has_at_most_as_many_tokens_as_the_model_has_positions(tmp_path: Path) -> None:
    """The task allows longer sentences."""
    spec = spec_of(tmp_path, "bart", "decoder", max_position_embeddings=9, eos_token_id=None)
    model = SplitModel(cast(ModelSpec, spec), replace(VOCABULARY, eos=22)).eval()
    with torch.no_grad():  # the end token is never the most likely one
        model.head.original.final_logits_bias[0, 22] = -1e9
    predicted = model.generate(batch_for("decoder"), max_length=40)
    assert {len(ids) for ids in predicted} == {9}


def test_a_label_beyond_the_head_is_named_in_the_error(tmp_path: Path) -> None:
    spec = HuggingFaceSpec(str(folder(tmp_path, "bert")))
    two = replace(VOCABULARY, num_labels=2)
    model = SplitModel(cast(ModelSpec, spec), two).eval()
    batch = batch_for("tokens")
    hidden = model.encode(batch.inputs, batch.mask)
    with pytest.raises(ConfigError, match=r"label 4, the head 0 … 1; "):
        cast(Head, model.head).loss(hidden, batch.mask, batch.targets)


@pytest.mark.parametrize(
    ("name", "head"),
    [("bert", "tokens"), ("roberta", "tokens"), ("gpt2", "causal"), ("bart", "decoder")],
)
def test_a_sequence_longer_than_the_positions_is_refused(
    tmp_path: Path, name: str, head: str
) -> None:
    """RoBERTa's positions start after its padding id, which is 0 here."""
    key = "n_positions" if name == "gpt2" else "max_position_embeddings"
    spec = spec_of(tmp_path, name, head, **{key: 6 + (name == "roberta")})
    model = SplitModel(cast(ModelSpec, spec), VOCABULARY).eval()
    batch = batch_for(head)
    model.encode(batch.inputs[:, :6], batch.mask[:, :6])
    with pytest.raises(ConfigError, match=r"positions for 6 tokens, a sample has 7"):
        model.encode(batch.inputs, batch.mask)


def test_names_map_to_the_original_names_and_back(tmp_path: Path) -> None:
    for name, head in (("bert", "pooled"), ("gpt2", "causal"), ("marian", "decoder")):
        spec = spec_of(tmp_path, name, head)
        with torch.device("meta"):
            ours = list(SplitModel(cast(ModelSpec, spec), VOCABULARY).state_dict())
        assert [spec.names.to_ours(spec.names.to_original(each)) for each in ours] == ours


@pytest.mark.thorough
def test_the_command_line_starts_without_transformers() -> None:
    """It does not import peft either, unless adapters are configured."""
    code = "import sys; import collapipe.cli.app, collapipe.config; "
    code += "collapipe.config.load_overrides([]); "
    code += "sys.exit(bool({'peft', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("value", [5.5, "many"])
def test_a_field_that_transformers_refuses_is_a_one_line_error(value: object) -> None:
    with pytest.raises(ConfigError, match=r"model\.config\.max_position_embeddings=") as caught:
        HuggingFaceSpec(family="bert", config={"max_position_embeddings": value})
    assert "\n" not in str(caught.value)


def test_layers_beyond_the_family_default_have_an_attention_type() -> None:
    spec = HuggingFaceSpec(family="gemma2", config={"num_hidden_layers": 40})
    assert spec.num_blocks == 40
    assert spec.own_config.layer_types[::2] == ["sliding_attention"] * 20


@pytest.mark.parametrize(
    "options",
    [
        {"family": "modernbert", "num_blocks": 5},
        {"family": "qwen3", "config": {"num_hidden_layers": 5}},
        {"family": "laguna", "config": {"num_hidden_layers": 5}},
    ],
)
def test_a_model_with_fewer_layers_can_be_saved(options: dict[str, Any], tmp_path: Path) -> None:
    """Transformers saves no configuration with kinds of layers that the model does not have."""
    config = HuggingFaceSpec(**options).run_config(None)
    config.save_pretrained(tmp_path)
    assert len(config.layer_types) == 5 == config.num_hidden_layers


def test_too_many_positions_are_refused_before_they_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marian would allocate its positions even on the meta device."""
    monkeypatch.setattr(transformers.AutoModelForSeq2SeqLM, "from_config", lambda *rest: 1 / 0)
    path = folder(tmp_path, "marian", max_position_embeddings=30_000_000)
    with pytest.raises(ConfigError, match="max_position_embeddings=30000000") as caught:
        HuggingFaceSpec(str(path))
    assert "\n" not in str(caught.value)


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A folder with a tiny BERT and its weights."""
    spec = spec_of(tmp_path, "bert", "tokens")
    config = spec.run_config(VOCABULARY)
    path = tmp_path / "weights"  # a folder that was read once is not read again
    transformers.AutoModelForTokenClassification.from_config(config).save_pretrained(path)
    return path


def test_no_foreign_attention_kernel_is_downloaded(pretrained: Path) -> None:
    """Attention uses plain torch operations even if the folder requests another kernel."""
    change_config(pretrained, attn_implementation="evil/kernel")
    spec = cast(ModelSpec, HuggingFaceSpec(str(pretrained), pretrained=True))
    assert len(SplitModel(spec, VOCABULARY).blocks) == 4


def test_a_pickle_that_the_configuration_names_is_not_read(pretrained: Path) -> None:
    change_config(pretrained, transformers_weights="pytorch_model.bin")
    (pretrained / "pytorch_model.bin").write_bytes(b"no weights")
    spec = cast(ModelSpec, HuggingFaceSpec(str(pretrained), pretrained=True))
    assert len(SplitModel(spec, VOCABULARY).blocks) == 4


def test_quantised_weights_are_refused(pretrained: Path) -> None:
    change_config(pretrained, quantization_config={"quant_method": "fp8"})
    spec = cast(ModelSpec, HuggingFaceSpec(str(pretrained), pretrained=True))
    with pytest.raises(ConfigError, match="quantised"):
        SplitModel(spec, VOCABULARY)


def change_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("content", ["null", "3", "[" * 100_000])
def test_a_configuration_without_fields_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.name=.* has no fields, or is nested too deeply"):
        HuggingFaceSpec(str(tmp_path))


def test_an_adapter_folder_is_refused_as_a_model(pretrained: Path) -> None:
    """Transformers would load the base model that the adapter names."""
    (pretrained / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/model"}')
    spec = HuggingFaceSpec(str(pretrained), pretrained=True)
    with pytest.raises(ConfigError, match="holds an adapter; merge it") as caught:
        spec.build_embedding(VOCABULARY)
    assert "\n" not in str(caught.value)
