"""A model trains on another device as on the CPU, and every tensor is on the right device."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from federated import TINY, run, weights
from huggingface import CASES, batch_for, spec_of
from learning import SETTINGS, check_close, learned
from second_device import ran, second_device
from torch import Tensor, nn
from torch.nn import functional

from collapipe.config import load_overrides
from collapipe.models.cut import cut_at
from collapipe.models.dropout import DropoutKey, drawing_from, dropout
from collapipe.models.huggingface.assembly import assembled
from collapipe.models.lora import LoraSpec
from collapipe.models.part import Optimizer
from collapipe.models.split import ModelSpec
from collapipe.models.stem import ActivationStore, StemSpec
from collapipe.models.transformer import TransformerSpec
from collapipe.process.torch_device import CPU
from collapipe.runs.model import initial_model
from collapipe.runs.rows import build_tokenizer, load_rows
from collapipe.tasks.evaluation import Evaluator, Predictor
from collapipe.tasks.generation import Decoding, Generator

SIZES: dict[str, Any] = {"dim": 16, "num_heads": 2, "feed_forward_dim": 24}
OWN = TransformerSpec(4, 2, **SIZES)
DERIVED = (
    *("own-pre", "own-lora", "own-stem", "own-cut"),
    *("bert-lora", "bert-kept", "t5-lora", "t5-cut"),
)
FURTHER = "own-post", "gpt2-lora", "t5-stem"
ALONE = "federation.num_units=1", "task.train_rows=12"
UNITS, SERVER = "runtime.torch_device=auto", "server.torch_device=auto"
TRAINED, LOSS, PREDICTION = {"_fused_adamw_", "bernoulli_"}, {"nll_loss_forward"}, {"argmax"}
STEM = "adapter=lora", "adapter.last_blocks=2", "adapter.cache=true"
SYNTHETIC = "model=huggingface", "data=synthetic", "data.max_eval_samples=20", "task.vocabulary=600"
SMALL = "{hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2}"
BERT = "model.family=bert", f"model.config={SMALL}"
GPT2 = "model.family=gpt2", "model.config={n_embd: 16, n_layer: 2, n_head: 2}"
OF_TASKS = {
    "dates": TINY,
    "classification": (*SYNTHETIC, *BERT),
    "ner": (*SYNTHETIC, *BERT),
    "causal_lm": (*SYNTHETIC, *GPT2),
}


@pytest.fixture
def second() -> Iterator[torch.device]:
    """Yield a device that computes like the CPU."""
    with second_device() as device:
        yield device


def derived(tmp_path: Path, name: str, store: ActivationStore | None = None) -> tuple[Any, str]:
    """Return a small model derived from another one, and its kind of head."""
    family, _, what = name.partition("-")
    head = {"own": "decoder", "bert": "pooled", "gpt2": "causal", "t5": "decoder"}[family]
    base: Any = OWN if family == "own" else spec_of(tmp_path, family, head)
    made: dict[str, Callable[[], ModelSpec]] = {
        "pre": lambda: base,
        "post": lambda: TransformerSpec(4, 2, **SIZES, norm="post", tie_embeddings=False),
        "lora": lambda: LoraSpec(base, rank=3, dropout=0.1),
        "kept": lambda: LoraSpec(base, rank=3, dropout=0.1, kept="bfloat16"),
        "stem": lambda: StemSpec(LoraSpec(base, rank=3, dropout=0.1, first_block=2), 2, store),
        "cut": lambda: cut_at(base, 2),
    }
    return made[what](), head


# Other families are built like one of these.
KINDS = "bert", "gpt2", "llama", "t5"


@pytest.mark.parametrize(
    ("name", "head"),
    [
        pytest.param(*case, marks=[] if case[0] in KINDS else [pytest.mark.thorough])
        for case in CASES
    ],
)
def test_a_family_trains_on_the_device_as_on_the_cpu(
    tmp_path: Path, second: torch.device, name: str, head: str
) -> None:
    """With dropout, whose masks are drawn on the device."""
    spec, batch = cast(ModelSpec, spec_of(tmp_path, name, head)), batch_for(head)
    found = learned(spec, batch, second)
    assert ran >= TRAINED
    check_close(found, learned(spec, batch, CPU))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [*DERIVED, *(pytest.param(name, marks=pytest.mark.thorough) for name in FURTHER)],
)
def test_a_derived_model_trains_on_the_device_as_on_the_cpu(
    tmp_path: Path, second: torch.device, name: str
) -> None:
    spec, head = derived(tmp_path, name)
    batch = batch_for(head)
    check_close(learned(spec, batch, second), learned(spec, batch, CPU))
    assert ran >= TRAINED


def test_cached_rows_of_a_stem_can_be_used_on_any_device(
    tmp_path: Path, second: torch.device
) -> None:
    """The cache is on disk; a cached row is moved to the model's device."""
    batch, outcomes = batch_for("decoder"), []
    for device in (second, second, CPU):
        store = ActivationStore(tmp_path / "kept", 2**20)
        outcomes.append(learned(derived(tmp_path, "own-stem", store)[0], batch, device))
        assert len(list((tmp_path / "kept").iterdir())) == batch.num_samples
    check_close(outcomes[1], outcomes[0])
    check_close(outcomes[2], outcomes[0])


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ([UNITS, "compression=int8", "compression.feedback=true"], set()),
        pytest.param([UNITS, "decoder.mode=control_unit"], LOSS, marks=pytest.mark.thorough),
        pytest.param([UNITS, "framework=vanilla_fl"], LOSS, marks=pytest.mark.thorough),
        pytest.param(
            [SERVER, "compression.gradient=int8"], LOSS | PREDICTION, marks=pytest.mark.thorough
        ),
        pytest.param([UNITS, SERVER, *STEM], LOSS | PREDICTION, marks=pytest.mark.thorough),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_a_run_on_the_device_ends_with_the_same_weights(
    tmp_path: Path, second: torch.device, options: list[str], needed: set[str]
) -> None:
    """Bit for bit. The units, the server or both use the device, and only they do."""
    run(tmp_path / "there", *ALONE, *options)
    assert ran & (LOSS | PREDICTION) == needed
    assert ran >= TRAINED
    run(tmp_path / "here", *ALONE, *(each for each in options if each not in (UNITS, SERVER)))
    there, here = weights(tmp_path / "there"), weights(tmp_path / "here")
    assert [name for name in here if not torch.equal(here[name], there[name])] == []


@pytest.mark.parametrize("task", OF_TASKS)
def test_a_model_predicts_the_same_on_the_device(second: torch.device, task: str) -> None:
    """Evaluations and scored predictions are equal; a causal model continues texts."""
    settings = load_overrides([f"task={task}", *OF_TASKS[task]])
    rows, found = load_rows(settings, "test"), []
    tokenizer = build_tokenizer(settings)
    for device in (second, CPU):
        model = initial_model(settings, tokenizer).eval().to(device)
        predictor: Any = Predictor(model, settings.task, tokenizer, scored=True)
        if task == "causal_lm":
            whole = assembled(settings.model, tokenizer.vocabulary, model.state_dict()).to(device)
            predictor = Generator(whole, settings.task, tokenizer, Decoding(3), scored=True)
        evaluation = Evaluator(settings.task, rows, tokenizer).evaluate(model)
        found.append((evaluation, list(predictor.predict(["3 May 2020", "a pot of tea"]))))
    assert found[0] == found[1]


FAULTS: dict[str, Callable[[Tensor], object]] = {
    "a mask": lambda x: x.masked_fill(torch.ones(3, 3, dtype=torch.bool), 0.0),
    "a mask of attention": lambda x: functional.scaled_dot_product_attention(
        x[None], x[None], x[None], attn_mask=torch.ones(3, 3, dtype=torch.bool)
    ),
    "token ids": lambda x: functional.embedding(torch.zeros(2, dtype=torch.long), x),
    "targets": lambda x: functional.cross_entropy(x, torch.zeros(3, dtype=torch.long)),
    "positions": lambda x: x + torch.ones(3),
    "rows behind others": lambda x: torch.cat((x, torch.ones(1, 3))),
    "weights": lambda x: nn.Linear(3, 2)(x),
    "a gradient": lambda x: torch.autograd.backward((2 * x.requires_grad_()).exp(), torch.ones(3)),
    "the generator": lambda x: torch.empty_like(x).bernoulli_(0.5, generator=torch.Generator()),
    "the optimiser's step": lambda x: stepped(x, torch.zeros(())),
    "numpy": lambda x: x.numpy(),
    "float64": lambda x: x.double(),
}


def stepped(x: Tensor, step: Tensor) -> None:
    """Take an optimiser's step with state on the CPU."""
    weight = nn.Parameter(x)
    optimizer = Optimizer(SETTINGS, nn.ParameterList([weight]))
    moments = {"0/exp_avg": torch.zeros_like(x), "0/exp_avg_sq": torch.zeros_like(x)}
    optimizer._state |= {"0/step": step, **moments}
    weight.grad = torch.ones_like(x)
    optimizer.step(0.1)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulated_device_raises_for_each_fault(second: torch.device, fault: str) -> None:
    """Otherwise the tests above would prove nothing."""
    with pytest.raises((RuntimeError, TypeError)):
        FAULTS[fault](torch.ones(3, 3).to(second))


def test_dropout_on_the_device_leaves_the_cpus_masks_unchanged(second: torch.device) -> None:
    """On the device, too, two layers of a part have different masks."""
    x, key = torch.ones(64), DropoutKey(1, 2, 3)
    with drawing_from(key.generator("head", 0)):
        there = [dropout(x.to(second), 0.3).cpu() for _ in range(2)]
        mixed = [dropout(x, 0.3) for _ in range(2)]
    with drawing_from(key.generator("head", 0)):
        here = [dropout(x, 0.3) for _ in range(2)]
    assert not torch.equal(there[0], there[1])
    assert torch.equal(torch.stack(mixed), torch.stack(here))


def test_optimizer_state_follows_its_weights(second: torch.device) -> None:
    """It moves to the weights' device, including the number of steps, and back to the CPU."""
    module = nn.Linear(3, 2).to(second)
    optimizer = Optimizer(SETTINGS, module)
    optimizer.load_state({"bias/step": torch.ones(()), "bias/exp_avg": torch.ones(2)})
    assert {each.device for each in optimizer._state.values()} == {second}
    assert {each.device for each in optimizer.state().values()} == {CPU}
