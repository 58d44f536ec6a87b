"""Plug-ins of a user: valid ones run, and faulty ones are reported in one line."""

from pathlib import Path

import pytest
from federated import run

from collapipe.config import load_overrides, own_overrides
from collapipe.errors import CollaPipeError, ConfigError
from collapipe.own_packages import place_in_plugin

# A task with exactly the members that docs/how-to/extend.md and the protocol require.
TASK = """
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset

from collapipe.tensors import IGNORED, Batch
from collapipe.tasks.task import Score, Splits


@dataclass(frozen=True)
class Pairs:
    sources: list
    targets: list
    tokenizer: object

    @property
    def lengths(self):
        return [len(ids) for ids in self.sources]

    def batch(self, rows):
        vocabulary = self.tokenizer.vocabulary

        def filled(all_ids, value):
            ids = [all_ids[row] for row in rows]
            longest = max(map(len, ids))
            return torch.tensor([each + [value] * (longest - len(each)) for each in ids])

        inputs = filled(self.sources, vocabulary.pad)
        return Batch(inputs, inputs != vocabulary.pad, filled(self.targets, IGNORED))

    def decode(self, predictions):
        end = self.tokenizer.vocabulary.eos
        return self.tokenizer.decode(
            [ids[: ids.index(end)] if end in ids else ids for ids in map(list, predictions)]
        )


@dataclass(frozen=True)
class Reverse:
    train_rows: int  # the options of task=dates
    validation_rows: int
    test_rows: int
    vocabulary: int
    max_length: int

    name = "reverse"
    columns = ("source", "target")
    heads = ("decoder",)
    listed_labels = None
    max_labels = 0

    def splits(self, seed):
        texts = [f"a{number} b{seed}" for number in range(self.train_rows)]
        rows = Dataset.from_dict({"source": texts, "target": [each[::-1] for each in texts]})
        return Splits(rows, rows.select(range(4)), rows.select(range(4)))

    def label_counts(self, rows):
        return {}

    def texts(self, rows):
        return zip(rows["source"], rows["target"])

    def encode(self, rows, tokenizer):
        end = [tokenizer.vocabulary.eos]
        sides = (tokenizer.encode(rows[side]) for side in self.columns)
        return Pairs(*([[*ids[:15], *end] for ids in side] for side in sides), tokenizer)

    def encode_apart(self, rows, tokenizer):
        return self.encode(rows, tokenizer)

    def inputs(self, texts, tokenizer):
        return self.encode({"source": texts, "target": texts}, tokenizer)

    def count(self, predictions, rows, labels):
        right = sum(map(str.__eq__, predictions, rows["target"]))
        return np.array([right, len(predictions)])

    def possible(self, statistics, labels):
        counts = statistics.counts
        return counts.shape == (2,) and bool(counts[0] <= counts[1])

    def score(self, statistics):
        return Score("exact", statistics.counts[0] / max(1, statistics.counts[1]), "")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the module search path."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_task_with_only_the_members_of_the_protocol_trains(own: Path) -> None:
    (own / "reverse_whole.py").write_text(TASK)
    run(own / "run", "task._target_=reverse_whole.Reverse")


@pytest.mark.parametrize(
    ("group", "fields", "fault"),
    [
        ("cluster", ["num_units"], "lacks control_unit, draw, num_devices; "),
        (
            "channel",
            ["interference_constant_w"],
            "lacks activation_bits, draw_uplink, model_bits; ",
        ),
        ("environment", [], "lacks conditions, start, step; "),
    ],
)
def test_a_class_without_members_is_refused_in_a_line_that_names_them(
    own: Path, monkeypatch: pytest.MonkeyPatch, group: str, fields: list[str], fault: str
) -> None:
    monkeypatch.chdir(own)
    options = "".join(f"    {each}: float\n" for each in fields) or "    pass\n"
    source = "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass Empty:\n"
    (own / f"empty_{group}.py").write_text(source + options)
    file = own / "conf" / group / "own.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("".join([f"_target_: empty_{group}.Empty\n", *(f"{f}: 1\n" for f in fields)]))
    with pytest.raises(ConfigError, match=rf"^{group}\._target_=empty_{group}\.Empty: {fault}"):
        run(own / "run", *own_overrides([f"{group}=own"]))


@pytest.mark.parametrize(
    ("drawn", "kind"), [("[1]", "list"), ("(1,)", "int"), ("None", "NoneType")]
)
def test_a_cluster_that_draws_no_devices_is_refused(own: Path, drawn: str, kind: str) -> None:
    name = f"draws_{kind}"
    (own / f"{name}.py").write_text(f"""
from collapipe.devices.presets import SyntheticCluster


class Boxes(SyntheticCluster):
    def draw(self, cost, unit, rng):
        return {drawn}
""")
    with pytest.raises(CollaPipeError, match=rf"cluster: Boxes\.draw returned {kind}, expected "):
        run(own / "run", f"cluster._target_={name}.Boxes")


@pytest.mark.parametrize("member", ["max_labels =", "def possible"])
def test_a_task_without_a_member_is_refused_in_a_line_that_names_it(own: Path, member: str) -> None:
    name = member.split()[-2 if "=" in member else -1]
    (own / f"without_{name}.py").write_text(TASK.replace(member, f"{member.replace(name, 'x')}"))
    fault = rf"^task\._target_=without_{name}\.Reverse: lacks {name}; collapipe\.tasks\.task\.Task "
    with pytest.raises(ConfigError, match=fault):
        load_overrides([f"task._target_=without_{name}.Reverse"])


def test_a_model_without_a_member_is_refused_in_a_line_that_names_it(own: Path) -> None:
    options = "num_blocks num_decoder_blocks dim num_heads feed_forward_dim dropout norm "
    options += "tie_embeddings"
    fields = "".join(f"    {each}: object\n" for each in options.split())
    made = "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass Model:\n"
    (own / "few.py").write_text(made + fields)
    fault = r"^model\._target_=few\.Model: lacks build_block, build_embedding, build_head, "
    with pytest.raises(ConfigError, match=fault):
        load_overrides(["model._target_=few.Model"])


def test_a_model_of_no_blocks_is_refused(own: Path) -> None:
    source = "from collapipe.models.transformer import TransformerSpec\n\n\n"
    source += "class Blockless(TransformerSpec):\n    def __post_init__(self):\n"
    source += '        object.__setattr__(self, "num_blocks", 0)\n'
    (own / "blockless.py").write_text(source)
    with pytest.raises(ConfigError, match=r"^model\.num_blocks=0: must be at least 1$"):
        load_overrides(["model._target_=blockless.Blockless"])


def test_a_strategy_without_its_method_is_refused_in_a_line_that_names_it(own: Path) -> None:
    source = "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass Idle:\n"
    (own / "idle.py").write_text(f"{source}    pass\n")
    with pytest.raises(ConfigError, match=r"^strategy\._target_=idle\.Idle: lacks plan_round; "):
        run(own / "run", "strategy=even", "strategy._target_=idle.Idle")


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("def splits(self, seed)", "def splits(self)", r"Reverse: splits must take \(seed\); col"),
        ("def score(self, ", "def score(self, more, ", r"score must take \(statistics\); "),
        ("return Splits(", "return (", "task: Reverse.splits returned tuple, expected Splits"),
        ("Splits(rows", "Splits(seed", "split train returned int, expected Dataset"),
        ('"target": [', '"goal": [', "rows of the split .* lack the column target, which"),
        ("each[::-1] for", "None for", "row 1: a text is a NoneType, not a str; correct"),
        ("select(range(4)), ", "select([]), ", "the split validation has no rows"),
        ("return Score(", "return (", "task: Reverse.score returned tuple, expected Score"),
        ('"exact", ', '"exact", np.nan * ', r"Reverse\.score\.value=nan: must be a finite number"),
        ('Score("exact"', "Score(None", r"task: Reverse\.score\.name=null: must be a text"),
        (
            "IGNORED))",
            "IGNORED).float())",
            r"a batch has .*, torch\.float32 \[\d+, \d+\]; expected",
        ),
        (
            "inputs != vocabulary.pad,",
            "(inputs != vocabulary.pad)[:, :1],",
            r"torch\.bool \[\d+, 1\], torch\.int64 ",
        ),
        ("return np.array(", "return (", "Reverse.count returned list, expected ndarray"),
    ],
)
def test_a_faulty_task_is_reported_in_one_line(
    own: Path, right: str, wrong: str, message: str
) -> None:
    name = own.name  # a new name for each case, because modules stay imported
    assert TASK.count(right) == 1
    (own / f"{name}.py").write_text(TASK.replace(right, wrong))
    with pytest.raises(CollaPipeError, match=message) as caught:
        run(own / "run", f"task._target_={name}.Reverse", "federation.rounds=1")
    assert "\n" not in str(caught.value)


def test_a_strategy_whose_method_takes_other_arguments_is_refused(own: Path) -> None:
    source = "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass Takes:\n"
    (own / "takes.py").write_text(f"{source}    def plan_round(self, request): ...\n")
    with pytest.raises(ConfigError, match=r"takes\.Takes: plan_round must take \(request, rng\); "):
        run(own / "run", "strategy=even", "strategy._target_=takes.Takes")


def test_a_model_that_builds_no_module_is_refused(own: Path) -> None:
    (own / "nothing_built.py").write_text("""
from collapipe.models.transformer import TransformerSpec


class Nothing(TransformerSpec):
    def build_block(self, index):
        return None
""")
    with pytest.raises(ConfigError, match=r"building blocks\.0 returned NoneType, expected Module"):
        run(own / "run", "model._target_=nothing_built.Nothing")


@pytest.mark.parametrize("cut", ["null", "1"])
def test_a_head_without_a_member_is_refused_in_a_line_that_names_it(own: Path, cut: str) -> None:
    """It could train, and fails in every evaluation."""
    (own / "silent_head.py").write_text("""
from collapipe.models.transformer import TransformerSpec
from torch import nn


class Silent(TransformerSpec):
    def build_head(self, vocabulary):
        head = Head()
        head.inner = super().build_head(vocabulary)
        return head


class Head(nn.Module):
    def loss(self, hidden, mask, targets):
        return self.inner.loss(hidden, mask, targets)
""")
    fault = r"^model\.build_head=silent_head\.Head: lacks generate; collapipe\.models\.split\.Head "
    with pytest.raises(ConfigError, match=fault):
        options = "model._target_=silent_head.Silent", f"framework.cut={cut}"
        run(own / "run", *options, "federation.rounds=1")


def test_a_model_of_a_users_class_is_refused_for_real_devices_before_training(own: Path) -> None:
    """They build blocks of CollaPipe's classes only; a run that only plans sends them none."""
    (own / "my_spec.py").write_text("""
from collapipe.models.transformer import TransformerSpec


class Mine(TransformerSpec):
    pass
""")
    (own / "boxes.yaml").write_text(
        "batch_size: 4\nmodel: {num_blocks: 4}\nclusters:\n"
        '  - {name: home, devices: [{name: pi, chunk: {u: 1}, address: "127.0.0.1:9"}]}\n'
    )
    options = ["model._target_=my_spec.Mine", "federation.num_units=1", "cluster=devices"]
    options.append(f"cluster.file={own}/boxes.yaml")
    with pytest.raises(ConfigError, match=r"^model: blocks of a Mine cannot be built on other "):
        load_overrides(options)
    load_overrides([*options, "framework.train=false"])


def test_a_block_that_raises_on_a_unit_is_named_with_its_file_and_line(own: Path) -> None:
    (own / "broken_block.py").write_text("""
from collapipe.models.transformer import TransformerSpec


class Broken(TransformerSpec):
    def build_block(self, index):
        block = super().build_block(index)
        block.register_forward_pre_hook(broken)
        return block


def broken(*arguments):
    raise RuntimeError("my block")
""")
    fault = r"RuntimeError: my block \(broken_block\.py, line 13\)"
    with pytest.raises(CollaPipeError, match=fault):
        run(own / "run", "model._target_=broken_block.Broken")


MODEL = """
from collapipe.models.transformer import EncoderBlock, TransformerSpec
import torch


def detached(module, arguments, output):
    return output.detach()


class Own(TransformerSpec):
    def build_block(self, index):
        block = EncoderBlock(self)
        CHANGE
        return block

    def build_head(self, vocabulary):
        head = super().build_head(vocabulary)
        loss, generate = head.loss, head.generate
        HEAD
        return head


KEPT = EncoderBlock(TransformerSpec(dim=16, num_heads=2, feed_forward_dim=16))
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "block.twin = block.attention",
            r"blocks\.0\.attention\.\S+ and blocks\.0\.twin\.\S+ are one",
        ),
        (
            "block = KEPT",
            r"blocks\.0\.\S+ and blocks\.1\.\S+ are one weight, and would train apart",
        ),
        (
            'block.register_buffer("old", torch.ones(2), persistent=False)',
            r"state_dict lacks the buffer blocks\.0\.old; ",
        ),
        ("block.register_forward_hook(detached)", r"the output of a EncoderBlock has no gradient"),
    ],
)
def test_a_faulty_block_is_reported_in_one_line(own: Path, change: str, message: str) -> None:
    name = own.name  # a new name for each case, because modules stay imported
    (own / f"{name}.py").write_text(MODEL.replace("CHANGE", change).replace("HEAD", ""))
    with pytest.raises(CollaPipeError, match=message):
        run(own / "run", f"model._target_={name}.Own")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "head.loss = lambda *each: loss(*each).detach()",
            "Decoder.loss has no gradient for its inp",
        ),
        (
            "head.loss = lambda hidden, *each: loss(hidden.detach(), *each)",
            "loss has no gradient for",
        ),
        (
            "head.generate = lambda *each: generate(*each)[1:]",
            r"generate returned \d rows, expected a",
        ),
        (
            "head.generate = lambda *each: None",
            r"generate returned NoneType, expected a list of tok",
        ),
    ],
)
def test_a_faulty_head_is_reported_in_one_line(own: Path, change: str, message: str) -> None:
    name = own.name
    (own / f"{name}.py").write_text(MODEL.replace("CHANGE", "").replace("HEAD", change))
    with pytest.raises(CollaPipeError, match=rf"model: \S*{message}"):
        run(own / "run", f"model._target_={name}.Own", "federation.rounds=1")


def test_a_model_without_a_weight_that_trains_is_refused(own: Path) -> None:
    frozen = "return super().build_embedding(vocabulary).requires_grad_(False)"
    source = MODEL.replace("CHANGE", "block.requires_grad_(False)")
    source = source.replace("HEAD", "head.requires_grad_(False)")
    source = source.replace(
        "KEPT", f"    def build_embedding(self, vocabulary):\n        {frozen}\n\nKEPT"
    )
    (own / "still.py").write_text(source)
    with pytest.raises(ConfigError, match=r"^model: no weight of it trains"):
        run(own / "run", "model._target_=still.Own")


def test_an_operation_without_values_is_named_with_its_file_and_line(own: Path) -> None:
    """torch calls our hooks for it, which are no code that failed."""
    (own / "reading.py").write_text(
        MODEL.replace("CHANGE", "torch.ones(2).sum().item()").replace("HEAD", "")
    )
    with pytest.raises(RuntimeError, match="meta tensors") as caught:
        run(own / "run", "model._target_=reading.Own")
    assert place_in_plugin(caught.value) == "reading.py, line 13"


def test_a_model_without_a_hash_is_refused(own: Path) -> None:
    source = "from dataclasses import dataclass\n\nfrom collapipe.models.transformer import "
    source += "TransformerSpec\n\n\n@dataclass(frozen=True)\nclass Listed(TransformerSpec):\n"
    (own / "listed.py").write_text(f"{source}    sizes: list[int] | None = None\n")
    with pytest.raises(
        ConfigError, match=r"^model: a Listed has no hash \(unhashable type: 'list'\)"
    ):
        load_overrides(["model._target_=listed.Listed", "+model.sizes=[1]"])
