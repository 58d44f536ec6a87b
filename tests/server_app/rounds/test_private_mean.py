"""The noisy mean of clipped updates: the influence of one unit, and the ε that a run reports."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from federated import play, run, settings_of, weights
from flwr.app import Context, Message
from hypothesis import given
from hypothesis import strategies as st
from resumed import World
from run_files import rounds_of, summary_of
from scripted_units import UNTRAINED, scripted_units
from sections import privacy_settings

from collapipe.errors import BudgetSpentError, ConfigError, StorageError
from collapipe.privacy.accounting import epsilon
from collapipe.privacy.clipping import update_norm
from collapipe.runs.folder import RunFolder
from collapipe.tensors import Tensors, not_finite
from collapipe.wire import records
from collapipe.wire.messages import Failure
from server_app.checkpoints.resumption import check_resumable
from server_app.evaluation import RunEvaluator
from server_app.records.summary import noise_warning
from server_app.rounds.private_mean import PrivateMean

SENT: Tensors = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[0.5]]), "n": torch.tensor(7)}
UPDATES = st.lists(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=2, max_size=5
)


def private_mean(clip_norm: float = 1.0, **options: Any) -> PrivateMean:
    settings = privacy_settings(clip_norm=clip_norm, **options)
    return PrivateMean(settings, clip_norm)


def moved(change: list[float]) -> Tensors:
    """The weights that a unit sends back after this change."""
    a, b = torch.tensor(change).split([2, 1])
    return {"a": SENT["a"] + a, "b": SENT["b"] + b.reshape(1, 1), "n": torch.tensor(0)}


def mean(private: PrivateMean, updates: list[list[float]], seed: int = 0) -> Tensors:
    private.check(range(len(updates)))
    private.charge(range(len(updates)))
    summed = private.summed([moved(each) for each in updates], SENT)
    return private.mean(summed, SENT, seed)


def difference(one: Tensors, other: Tensors) -> float:
    return update_norm(one, other)


def test_integer_tensors_are_not_summed() -> None:
    private = private_mean(100.0)
    assert private.summed([moved([1, 2, 3])], SENT).changes.keys() == {"a", "b"}


def test_short_updates_without_noise_are_averaged() -> None:
    found = mean(private_mean(100.0), [[1, 2, 3], [3, 2, -5]])
    assert found["a"].tolist() == [3.0, 0.0] and found["b"].item() == -0.5
    assert found["n"] == 7, "integer tensors are not averaged"


@given(UPDATES, st.floats(0.1, 10))
def test_a_unit_moves_the_sum_by_the_clip_norm_at_most(
    updates: list[list[float]], clip_norm: float
) -> None:
    """The sum with any update of the unit and the sum without it differ by at most the clip norm.

    ε is computed from this sensitivity.
    """
    with_it = mean(private_mean(clip_norm), updates)
    without = mean(private_mean(clip_norm), [*updates[:-1], [0.0, 0.0, 0.0]])
    rounding = 1e-5 * clip_norm + 1e-6
    assert len(updates) * difference(with_it, without) <= clip_norm + len(updates) * rounding


def test_noise_has_the_deviation_that_the_noise_multiplier_sets() -> None:
    options = {"noise_multiplier": 3.0, "noise_seed": 1}
    sent = {"a": torch.zeros(20_000)}
    private = private_mean(2.0, **options)
    found = private.mean(private.summed([sent, sent], sent), sent, seed=5)["a"]
    assert float(found.std()) == pytest.approx(3.0 * 2.0 / 2, rel=0.03)
    assert abs(float(found.mean())) < 0.1


def test_noise_repeats_only_with_a_noise_seed() -> None:
    def once(**options: Any) -> Tensors:
        return mean(private_mean(noise_multiplier=1.0, **options), [[1, 2, 3], [3, 2, 1]], seed=9)

    assert torch.equal(once(noise_seed=1)["a"], once(noise_seed=1)["a"])
    assert not torch.equal(once()["a"], once()["a"])


@pytest.mark.parametrize("noise_multiplier", [0.0, 0.05])
def test_the_clip_norm_follows_the_quantile(noise_multiplier: float) -> None:
    """Three quarters of the norms 1 … 20 are at most 15."""
    updates = [[float(length), 0.0, 0.0] for length in range(1, 21)]
    options = {"noise_multiplier": noise_multiplier, "noise_seed": 3}
    private = private_mean(2.0, clip_quantile=0.75, **options)
    for seed in range(50):
        mean(private, updates, seed)
    assert private.clip_norm == pytest.approx(15, abs=1.6)


def test_sum_and_count_are_as_private_as_the_sum_alone() -> None:
    """1/z² = 1/z_Δ² + 1/(2σ_b)², because a unit changes the count by a half."""
    for units in (2, 30, 500):
        private = private_mean(noise_multiplier=2.0, clip_quantile=0.5)
        deviation, of_count = private._deviations(units)
        assert deviation**-2 + (2 * of_count) ** -2 == pytest.approx(2.0**-2)


def test_noise_changes_the_clip_norm_by_no_more_than_all_units_could() -> None:
    private = private_mean(noise_multiplier=1e6, clip_quantile=0.5, noise_seed=1)
    for seed in range(10):
        before = private.clip_norm
        mean(private, [[1, 2, 3], [3, 2, 1]], seed)
        assert abs(math.log(private.clip_norm / before)) <= 0.1 * (1 + 1e-9)


def test_a_restored_account_equals_the_stored_one() -> None:
    before = private_mean(noise_multiplier=4.0, clip_quantile=0.5)
    mean(before, [[1, 2, 3], [3, 2, 1]])
    after = private_mean(noise_multiplier=4.0, clip_quantile=0.5)
    after.restore(before.packed(), before.rounds)
    assert (after.clip_norm, after.rounds) == (before.clip_norm, {0: 1, 1: 1})
    assert after.epsilon == before.epsilon


def dp_accounted(noise_multiplier: float, rounds: int) -> float:
    """ε according to dp-accounting's composition of privacy loss distributions."""
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    return float(PLDAccountant().compose(event, rounds).get_epsilon(1e-5))


@pytest.mark.parametrize("noise_multiplier", [1.0, 4.0])
def test_epsilon_is_computed_for_the_unit_with_the_most_rounds(noise_multiplier: float) -> None:
    private = private_mean(noise_multiplier=noise_multiplier)
    for units in ([0, 1], [1, 2], [1], [2, 3]):
        private.charge(units)
    assert private.rounds == {0: 1, 1: 3, 2: 2, 3: 1}
    assert private.epsilon == pytest.approx(dp_accounted(noise_multiplier, 3), rel=1e-3)


def test_a_unit_is_charged_for_the_rounds_whose_sums_contain_its_update(tmp_path: Path) -> None:
    """Each round draws one of three units, and unit 1 fails whenever it is drawn."""
    honest = scripted_units()

    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 1:
            return Message(records.pack(Failure("WireError", "it lies")), reply_to=message)
        return honest(message, context)

    options = *UNTRAINED, "strategy=random", "strategy.num_scheduled=1", "federation.rounds=6"
    play(tmp_path / "run", "privacy=private", *options, client=client)  # type: ignore[arg-type]
    lines = rounds_of(tmp_path / "run")
    planned = [line["plan"]["clusters"][0]["unit"] for line in lines]
    assert {*planned} == {0, 1, 2}
    rounds = RunFolder(tmp_path / "run", resumed=True).account()
    assert rounds == {unit: planned.count(unit) for unit in (0, 2)}
    expected = dp_accounted(4.0, max(rounds.values()))
    assert lines[-1]["epsilon"] == pytest.approx(expected, rel=1e-3)


def test_the_summary_counts_a_charged_round_even_if_the_run_fails_before_recording_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*_: object) -> None:
        raise StorageError("no space is left")

    monkeypatch.setattr(RunEvaluator, "evaluate", evaluate)
    with pytest.raises(StorageError):
        options = *UNTRAINED, "privacy=private", "federation.rounds=1"
        play(tmp_path / "run", *options, client=scripted_units())
    folder = RunFolder(tmp_path / "run", resumed=True)
    assert folder.account() == {0: 1, 1: 1, 2: 1}
    assert summary_of(folder.path)["privacy"]["epsilon"] == pytest.approx(0.93, abs=0.005)


def test_a_round_beyond_the_budget_does_not_begin() -> None:
    private = private_mean(noise_multiplier=4.0, max_epsilon=1.2)
    mean(private, [[1, 2, 3], [3, 2, 1]])
    with pytest.raises(BudgetSpentError, match=r"max_epsilon=1\.2 is spent: ε = .* after one more"):
        mean(private, [[1, 2, 3], [3, 2, 1]])
    assert private.rounds == {0: 1, 1: 1}


PRIVATE = "privacy=private", "privacy.noise_seed=3", "privacy.clip_quantile=0.5"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds instead of four: ε of a third would exceed the limit."""
    folder = tmp_path_factory.mktemp("private") / "run"
    options = *PRIVATE, "privacy.max_epsilon=1.6", "federation.rounds=4"
    play(folder, *options, client=scripted_units())
    return folder


def test_a_run_ends_before_epsilon_exceeds_its_limit_and_reports_why(whole: Path) -> None:
    summary = summary_of(whole)
    lines = rounds_of(whole)
    assert (summary["status"], len(lines)) == ("completed", 2)
    assert summary["privacy"]["epsilon"] == lines[-1]["epsilon"] <= 1.6 < 2 * lines[0]["epsilon"]
    assert "privacy.max_epsilon=1.6 is spent" in summary["privacy"]["ended"]
    assert summary["privacy"]["noise"] == "privacy.noise_seed=3"
    assert {*summary["constants"]["estimated"].values()} == {None}, "from exact gradients"
    assert summary["metric"] is not None, "the trained model is evaluated"


def test_noise_comes_from_the_operating_system_unless_a_seed_is_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = *UNTRAINED, "privacy=private", "federation.rounds=1"
    found = run(tmp_path / "run", *options, client=scripted_units())
    times = 4 * math.sqrt(sum(weight.numel() for weight in found.values())) / 3
    assert f"noise in the mean of 3 units is {times:,.0f} times" in capsys.readouterr().out
    few = "strategy=random", "strategy.num_scheduled=2"
    settings = settings_of(tmp_path, ["privacy=private", *few])
    assert "the mean of 2 units is 200 times" in str(noise_warning(settings, 10_000))
    assert not_finite(found) is None
    summary = summary_of(tmp_path / "run")
    assert summary["privacy"]["noise"] == "the operating system's"


def test_a_private_run_with_a_tokeniser_of_units_words_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for tokeniser, warned in ("federated", 1), ("bytes", 0):
        caplog.clear()
        options = *UNTRAINED, "federation.rounds=1", f"data.tokenizer={tokeniser}"
        run(tmp_path / tokeniser, "privacy=private", *options, client=scripted_units())
        assert sum("words" in record.message for record in caplog.records) == warned


@pytest.mark.parametrize(
    ("option", "fault"),
    [
        ("decoder.mode=per_cluster", "set decoder.mode=control_unit"),
        ("decoder.mode=auto", "set decoder.mode=control_unit"),
        ("framework=pipeline", "averages nothing"),
        ("federation.weighting=tokens", "set federation.weighting=uniform"),
        ("federation.max_update_norm=10", r"max_update_norm=10 .* set it to null"),
        ("server_optimizer.average=median", "set server_optimizer.average=mean"),
        ("privacy.clip_norm=null", "set privacy.clip_norm"),
        ("privacy.noise_multiplier=0", "set privacy.noise_multiplier"),
        ("privacy.noise_multiplier=1e-160", "too small to protect anyone"),
        ("privacy.noise_multiplier=1e14", r"privacy\.noise_multiplier"),
    ],
)
def test_options_that_would_undo_privacy_are_refused(
    option: str, fault: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=fault):
        settings_of(tmp_path, ["privacy=private", option])


def test_rounds_that_a_resumed_run_repeats_count_twice_in_epsilon(tmp_path: Path) -> None:
    """A run of three rounds resumes from the first round's checkpoint."""
    begun = World(tmp_path, *UNTRAINED, "privacy=private", "federation.rounds=3")
    once = begun.run(tmp_path / "run", client=scripted_units())
    assert RunFolder(once, resumed=True).account() == {0: 3, 1: 3}
    world = World(tmp_path, *UNTRAINED, "privacy=private", "federation.rounds=4")
    world.run(once, "000001", scripted_units())
    found = [line["epsilon"] for line in rounds_of(once)]
    # rounds 2 and 3 count twice
    expected = [epsilon(world.settings.privacy, rounds) for rounds in (1, 4, 5, 6)]
    assert found == expected
    assert summary_of(once)["privacy"]["epsilon"] == expected[-1]


def test_a_run_with_a_spent_budget_is_not_resumed_and_keeps_its_last_rounds(tmp_path: Path) -> None:
    """``resume`` could not repeat the rounds after the checkpoint, which it removes."""
    # the budget of three rounds
    world = World(tmp_path, *UNTRAINED, "privacy=private", "privacy.max_epsilon=1.7")
    folder = world.run(tmp_path / "run", client=scripted_units())
    before, lines = weights(folder), (folder / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"^privacy\.max_epsilon=1\.7: is spent by the rounds"):
        world.run(folder, "000001", scripted_units())
    assert all(each.equal(before[name]) for name, each in weights(folder).items())
    assert (folder / "metrics.jsonl").read_text() == lines


@pytest.mark.parametrize(
    ("known_bytes", "seed", "refused"), [(1, "null", True), (2, "null", False), (1, "3", False)]
)
def test_a_spent_budget_forbids_to_resume_only_if_charged_rounds_would_be_removed(
    tmp_path: Path, known_bytes: int, seed: str, refused: bool
) -> None:
    """A run without rounds after its checkpoint is completed. Seeded noise is not charged again."""
    options = "privacy=private", "privacy.max_epsilon=1.7", f"privacy.noise_seed={seed}"
    settings = settings_of(tmp_path, [*options, "federation.rounds=6"])
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "account.json").write_text('{"0": 3, "1": 3, "2": 3}')
    progress = SimpleNamespace(round=2, sizes={"metrics.jsonl": known_bytes})
    checkpoint: Any = SimpleNamespace(configuration=settings.tree, progress=progress)
    with pytest.raises(ConfigError, match="is spent") if refused else nullcontext():
        check_resumable(settings, checkpoint)


def test_repeated_rounds_are_not_charged_if_the_noise_has_a_seed() -> None:
    private = private_mean(noise_multiplier=4.0, noise_seed=1)
    private.restore(private.packed(), {0: 3, 1: 3})
    assert private.rounds == {}


@pytest.mark.parametrize("text", ["[]", '{"0": 0}', '{"-1": 2}', "no"])
def test_an_invalid_account_file_is_refused(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path)
    assert folder.account() == {}
    (tmp_path / "account.json").write_text(text)
    with pytest.raises(ConfigError, match="not the account of a run"):
        folder.account()


def test_a_limit_that_one_round_exceeds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_epsilon=0\.1: one round exceeds it"):
        play(tmp_path / "run", "privacy=private", "privacy.max_epsilon=0.1")
