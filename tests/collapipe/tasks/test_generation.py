"""Generation with a cache gives the same texts as computing the whole prefix for each token."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
import torch
from huggingface import VARIANTS, spec_of, without_dropout
from tokenizers import decoders
from tokenizers.models import BPE
from torch import Tensor
from trained import of_texts

from collapipe.errors import ConfigError
from collapipe.models.huggingface.assembly import assembled
from collapipe.models.lora import LoraSpec
from collapipe.models.split import ModelSpec, SplitModel
from collapipe.tasks.causal_lm import CausalLM
from collapipe.tasks.evaluation import Predictor
from collapipe.tasks.generation import Conversation, Decoding, Generator
from collapipe.tensors import mask_of, padded
from collapipe.text.chat_template import ChatTemplate
from collapipe.text.tokenizer import SpecialTokens, Tokenizer

TEXTS = ["A hedgehog reads.", "Two", ""]
TASK = CausalLM(None, True, 300, 40)
WORDS = of_texts(TEXTS, 280)


def models(tmp_path: Path, name: str, adapters: bool = False) -> tuple[SplitModel, Any]:
    """The split model and the whole model, with the same weights."""
    sizes = {"vocab_size": 280, "max_position_embeddings": 60, "n_positions": 60}
    base = cast(
        ModelSpec, spec_of(tmp_path, name, "causal", **sizes, **without_dropout(VARIANTS[name][0]))
    )
    spec = LoraSpec(base, 3, 9.0) if adapters else base
    torch.manual_seed(2)
    split = SplitModel(spec, WORDS.vocabulary).eval()
    with torch.no_grad():
        for weight in split.parameters():
            weight += 0.3 * torch.randn_like(weight)
    return split, assembled(spec, WORDS.vocabulary, split.state_dict())


def rows_of(texts: Sequence[str]) -> list[list[int]]:
    """The tokens that the task encodes texts to."""
    batch = TASK.inputs(texts, WORDS).batch(range(len(texts)))
    return [row[real].tolist() for row, real in zip(batch.inputs, batch.mask, strict=True)]


@torch.inference_mode()
def anew(model: SplitModel, row: list[int], tokens: int) -> tuple[list[int], float]:
    """The greedy tokens after a row and their log probability, without a cache."""
    written, log_probability, head = list[int](), 0.0, cast(Any, model.head)
    while len(written) < tokens and WORDS.vocabulary.eos not in written:
        seen = [[*row, *written]]
        hidden = model.encode(padded(seen, 0), mask_of(seen))
        logits = head.logits(hidden, mask_of(seen))[0, -1].log_softmax(-1)
        written.append(int(logits.argmax()))
        log_probability += float(logits[written[-1]])
    return written, log_probability


@pytest.mark.parametrize(
    ("name", "adapters"),
    [("llama", False), ("llama", True), ("gpt2", True), ("qwen2", False), ("llama-tied", False)],
)
def test_generation_equals_greedy_decoding_without_a_cache(
    tmp_path: Path, name: str, adapters: bool
) -> None:
    """Each text of a batch is continued as if alone, up to its end, with its log probability."""
    split, whole = models(tmp_path, name, adapters)
    generator = Generator(whole, TASK, WORDS, Decoding(20), scored=True)
    expected = [anew(split, row, 20) for row in rows_of(TEXTS)]
    for texts, wanted in ((TEXTS, expected), (TEXTS[1:2], expected[1:2])):
        found = [*generator.predict(texts)]
        assert [each.text for each in found] == WORDS.decode([ids for ids, _ in wanted])
        probabilities = [each.scores["log_probability"] for each in found]
        assert probabilities == pytest.approx([each for _, each in wanted], abs=1e-3)


def test_a_split_model_gives_the_next_token_and_its_probability(tmp_path: Path) -> None:
    """A user's own model class gives one token, too."""
    split, _ = models(tmp_path, "llama")
    expected = [anew(split, row, 1) for row in rows_of(TEXTS)]
    found = [*Predictor(split, TASK, WORDS, scored=True).predict(TEXTS)]
    assert [each.text for each in found] == WORDS.decode([ids for ids, _ in expected])
    probabilities = [each.scores["log_probability"] for each in found]
    assert probabilities == pytest.approx([each for _, each in expected], abs=1e-4)


def test_a_text_ends_at_any_end_token_of_the_model(tmp_path: Path) -> None:
    """A callback receives the text in pieces."""
    split, whole = models(tmp_path, "llama")
    (row,) = rows_of(TEXTS[:1])
    ids, pieces = anew(split, row, 20)[0], list[str]()
    whole.config.eos_token_id = [ids[7], 279]
    end = ids.index(ids[7]) + 1
    generator = Generator(whole, TASK, WORDS, Decoding(20))
    (found,) = generator.predict(TEXTS[:1], pieces.append)
    assert found.text == WORDS.decode([ids[:end]])[0] == "".join(pieces)
    assert len(pieces) > 1


def test_pieces_of_a_text_join_to_it_if_its_tokeniser_drops_a_first_blank() -> None:
    """As Llama 2's, Mistral's and Phi 3's do: lines keep their indentation. A character of several
    tokens is one piece."""
    known = [*"▁ab\n", *(f"<0x{byte:02X}>" for byte in "é".encode()), "</s>"]
    vocabulary = {token: number for number, token in enumerate(known)}
    words = tokenizers.Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    words.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    own = Tokenizer(words.to_str(), SpecialTokens("</s>", "</s>"))
    prompt, written, pieces = [1, 2], [0, 1, 3, 0, 0, 2, 4, 5], list[str]()

    def generate(ids: Tensor, streamer: Any, **_: Any) -> Any:
        for each in (ids, *torch.tensor(written)[:, None]):
            streamer.put(each)
        streamer.end()
        return SimpleNamespace(sequences=torch.tensor([[*prompt, *written]]))

    config = SimpleNamespace(eos_token_id=None)
    model = SimpleNamespace(config=config, device=torch.device("cpu"), generate=generate)
    (found,) = Generator(model, TASK, own, Decoding(8)).continued([prompt], pieces.append)
    assert "".join(pieces) == found.text == "a\n  bé"
    assert "é" in pieces


def test_draws_depend_on_the_seed(tmp_path: Path) -> None:
    """Draws are greedy if ``top_p`` allows only one token."""
    _, whole = models(tmp_path, "gpt2")

    def texts(**options: Any) -> list[str]:
        generator = Generator(whole, TASK, WORDS, Decoding(12, **options))
        return [each.text for each in generator.predict(TEXTS)]

    assert texts(temperature=0.9, seed=1) == texts(temperature=0.9, seed=1)
    assert texts(temperature=0.9, seed=1) != texts(temperature=0.9, seed=2)
    assert texts(temperature=0.9, top_p=1e-6) == texts() != texts(temperature=0.9, top_p=0.99)


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--top-p 0\.5: .*--temperature"):
        Decoding(1, top_p=0.5)
    for option, value in (("--temperature", math.inf), ("--top-p", math.nan)):
        with pytest.raises(ConfigError, match=f"^{option} {value}: must be a finite number"):
            Decoding(1, **{"temperature": 1.0, option[2:].replace("-", "_"): value})
    _, whole = models(tmp_path, "gpt2")
    with pytest.raises(ConfigError, match=r"^--max-new-tokens 60: .* 60 positions, .* 1 tokens"):
        next(Generator(whole, TASK, WORDS, Decoding(60)).predict([""]))


def test_an_answer_without_a_limit_fills_the_models_remaining_positions(tmp_path: Path) -> None:
    split, whole = models(tmp_path, "gpt2")
    generator, row = Generator(whole, TASK, WORDS, Decoding(None)), [5] * 54
    (found,) = generator.continued([row])
    assert found.text == WORDS.decode([anew(split, row, 6)[0]])[0]
    with pytest.raises(ConfigError, match=r"^the model has 60 positions, .* 60 tokens; shorten"):
        generator.continued([[5] * 60])


def test_each_answer_follows_all_earlier_messages(tmp_path: Path) -> None:
    split, whole = models(tmp_path, "llama")
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}, "2026-01-01")
    tokenizer = replace(WORDS, chat_template=template)
    conversation = Conversation(Generator(whole, TASK, WORDS, Decoding(9)), tokenizer)
    one, two = (each.text for each in conversation.predict(["Two owls", "and?"]))
    first, second = WORDS.encode(["Two owls", f"Two owls{one}and?"])
    assert one == WORDS.decode([anew(split, first, 9)[0]])[0]
    assert two == WORDS.decode([anew(split, second, 9)[0]])[0]
