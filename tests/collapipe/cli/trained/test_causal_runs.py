"""A run of a causal model with adapters: export, reuse of adapters, prediction and chat."""

import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from huggingface import folder
from safetensors.torch import load_file, save_file

from collapipe import config
from collapipe.cli.trained import predict
from collapipe.cli.trained.export import export_run, export_tokenizer
from collapipe.cli.trained.predict import predict_texts, typed_lines
from collapipe.errors import ConfigError
from collapipe.runs.folder import RunFolder
from collapipe.runs.model import initial_model, read_tokenizer
from collapipe.runs.rows import build_tokenizer
from collapipe.text.chat_template import ChatTemplate
from collapipe.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """Options of a run with a small pretrained model and new adapters."""
    path = folder(tmp_path, "llama", vocab_size=260, max_position_embeddings=400)
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(path)
    )
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.6)
    model.save_pretrained(path)
    export_tokenizer(Tokenizer.of_bytes(), "causal", 40, path)
    options = ["task=causal_lm", "data=synthetic", "model=huggingface", f"model.name={path}"]
    return [*options, "model.pretrained=true", "adapter=lora", f"hydra.run.dir={tmp_path / 'run'}"]


@pytest.fixture
def run_dir(tmp_path: Path, overrides: list[str]) -> Path:
    """A run's folder as after training: the adapters have changed."""
    settings = config.load_overrides([*overrides, "adapter.rank=3", "adapter.alpha=5"])
    tokenizer, run = build_tokenizer(settings), RunFolder(tmp_path / "run")
    model = initial_model(settings, tokenizer)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.3 * torch.randn(
                    weight.shape, generator=torch.Generator().manual_seed(3)
                )
    run.write_config(settings)
    run.write_tokenizer(tokenizer)
    run.write_base({})
    run.write_weights(model.state_dict())
    return tmp_path / "run"


@pytest.fixture
def answers(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """A function that returns the lines that ``collapipe predict`` prints for texts."""

    def predict(texts: Sequence[str], **options: Any) -> list[str]:
        capsys.readouterr()
        predict_texts(run_dir, [texts], (), **options)
        return capsys.readouterr().out.removesuffix("\n").split("\n")

    return predict


def test_a_run_can_start_with_the_adapters_of_another_run(
    tmp_path: Path, run_dir: Path, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's options get the rank, alpha and target modules of these adapters."""
    out = tmp_path / "out"
    export_run(run_dir, out, (), adapter=True)
    how = capsys.readouterr().out.rpartition("load it with ")[2]
    whole = eval(how, {"peft": peft, "transformers": transformers})
    assert any("lora_A" in name for name in whole.state_dict())
    begun = [*overrides, f"adapter.path={out}"]
    settings = config.load_overrides([*begun, "adapter.rank=3"])
    adapter: Any = settings.adapter
    assert (adapter.rank, adapter.alpha, adapter.target_modules) == (3, 5, ("q_proj", "v_proj"))
    tokenizer = build_tokenizer(settings)
    first, saved = initial_model(settings, tokenizer).state_dict(), RunFolder(run_dir, resumed=True)
    kept = transformers.AutoTokenizer.from_pretrained(out)
    assert kept("a hen").input_ids[1:] == tokenizer.encode(["a hen"])[0]
    trained = load_file(saved.path / "model/model.safetensors")
    assert all(torch.equal(first[name], weight) for name, weight in trained.items())
    fewer, more = "target_modules=[q_proj]", "target_modules=[q_proj,v_proj,o_proj]"
    for option in ("rank=4", "alpha=16", "rslora=true", fewer, more):
        name = option.partition("=")[0]
        with pytest.raises(ConfigError, match=rf"^adapter\.{name}=.*adapter\.path={out} have"):
            config.load_overrides([*begun, f"adapter.{option}"])
    same = [*begun, "adapter.target_modules=[v_proj,q_proj]"]
    assert config.load_overrides(same).adapter == adapter
    content = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps({**content, "target_modules": ".*proj"}))
    paths: Any = config.load_overrides(same).adapter
    assert paths.target_modules == ("self_attn.q_proj", "self_attn.v_proj")
    shutil.rmtree(out)
    assert config.load_text(settings.text).adapter == adapter  # a unit does not have the folder
    with pytest.raises(ConfigError, match=rf"^adapter\.path={out}: needs"):
        config.load_overrides(begun)


def test_an_answer_is_the_same_piece_by_piece_on_a_terminal(
    answers: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer to a text is the same alone and as one of several."""
    (plain,) = answers(["two owls"], max_new_tokens=30)
    first, second = answers(["two owls", "a"], max_new_tokens=30)
    assert first == plain != second
    assert plain.startswith(answers(["two owls"])[0])
    found = json.loads(answers(["two owls"], max_new_tokens=30, as_json=True)[0])
    assert found["log_probability"] < 0
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    pieces = list[str]()
    monkeypatch.setattr(predict, "print", lambda *text, **_: pieces.extend(text), raising=False)
    answers(["two owls"], max_new_tokens=30)
    assert "".join(pieces) == plain and len(pieces) > 3


def test_a_chat_needs_a_template(run_dir: Path, answers: Callable[..., list[str]]) -> None:
    """With a template, a later answer depends on earlier messages."""
    tokenizer = read_tokenizer(run_dir / "model")

    def give(source: str) -> None:
        template = ChatTemplate(source, {"eos_token": "</s>"}, "2026-01-01")
        run = RunFolder(run_dir, resumed=True)
        run.write_tokenizer(replace(tokenizer, chat_template=template))
        run.write_weights(load_file(run_dir / "model/model.safetensors"))

    def chat(*texts: str) -> list[float]:
        lines = answers(texts, chat=True, max_new_tokens=9, as_json=True)
        return [json.loads(line)["log_probability"] for line in lines]

    with pytest.raises(ConfigError, match=r"^--chat: .* no chat template"):
        chat("hello")
    give(TEMPLATE)
    first, second = chat("a", "b")
    assert [first] == chat("a")
    assert [second] != chat("b")
    give("{{ raise_exception('roles of messages') }}")
    with pytest.raises(ConfigError, match=r"^--chat: the chat template refuses it \(roles"):
        chat("hello")


def test_a_prompt_is_shown_for_each_typed_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert [*typed_lines(io.BytesIO(b"a\n\n \nb\n"))] == [["a", "b"]]
    assert capsys.readouterr().out == "> > \n"


def test_weights_of_another_model_are_refused(
    run_dir: Path, answers: Callable[..., list[str]]
) -> None:
    file = run_dir / "model/model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "lora_B" in name)
    for changed, odd in (
        ({**weights, name: weights[name][1:].clone()}, "lora_B"),
        ({**weights, "blocks.0.original.odd": weights[name].clone()}, "odd"),
    ):
        save_file(changed, file)
        with pytest.raises(ConfigError, match=rf"^{file}: not the weights of .*{odd}.*; restore"):
            answers(["a"], max_new_tokens=2)
