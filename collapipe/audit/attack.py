"""A run's audit: every attack under each condition."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TypeVar, get_args

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from collapipe import __version__
from collapipe.audit import inverters
from collapipe.audit.inverters import Inverter, Public, best
from collapipe.audit.material import Encoder, Material, Texts, travelled
from collapipe.audit.membership import membership_of
from collapipe.audit.recovery import frequent, share_of
from collapipe.audit.result import Attack, Audit, Condition, Recovery, State
from collapipe.audit.update_attacks import NUM_SIZES, update_recoveries
from collapipe.config import Settings
from collapipe.models.sent_rows import RowsRead
from collapipe.models.split import SplitModel
from collapipe.runs.model import initial_model
from collapipe.runs.rows import sends_words
from collapipe.seeds import derive
from collapipe.state import Precision

T = TypeVar("T")
_NOISES = 0.5, 1.0, 2.0
_TEXTS = {"pooled": "labels", "tokens": "each word's label", "causal": "which are the texts"}


def audit(held: Material, *, trained_rounds: int) -> Audit:
    """Run all attacks on a run that has ``trained_rounds``, and return their figures."""
    settings = held.settings
    models: dict[State, SplitModel] = {
        "frozen": initial_model(settings, held.tokenizer),
        "trained": held.model,
    }
    encoders = {
        state: Encoder.of(settings.model, model, held.tokenizer.vocabulary)
        for state, model in models.items()
    }
    blocks = len(encoders["trained"].model.blocks)
    sent = _sent_by(settings, blocks)
    cuts = chain.from_iterable(_by_cut(held, sent, *each) for each in encoders.items())
    # a list: a fault in the attacked weights ends the audit before its slow attacks
    rounds = chain.from_iterable([update_recoveries(held, *each) for each in models.items()])
    return Audit(
        version=__version__,
        seed=settings.seed,
        configuration=settings.tree,
        trained_rounds=trained_rounds,
        rows=held.private.num_rows,
        tokens=int(held.private.real.sum()),
        public_rows=held.public.num_rows,
        public_sha256=held.public_sha256,
        sends=settings.server_has_heads,
        sent=sent,
        targets=_targets(settings),
        recoveries=_all(cuts, "fitting attacks after block", models, range(blocks + 1)),
        updates=_all(rounds, "attacking updates of size", models, range(1, NUM_SIZES + 1)),
        membership=membership_of(settings, held.model, held.tokenizer, held.unit),
        hidden=_hidden(settings),
    )


def _all(
    found: Iterator[list[T]], what: str, states: Iterable[State], numbers: range
) -> tuple[T, ...]:
    """Announce each step before it runs: in a progress bar, or as a line on standard error."""
    console, results = Console(stderr=True, highlight=False), list[T]()
    steps = [f"{what} {n} of {numbers[-1]}, {state} weights" for state in states for n in numbers]
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(steps))
        for step in steps:
            bar.update(task, description=step)
            if not console.is_terminal:
                console.print(step, soft_wrap=True)
            results += next(found)
            bar.advance(task)
    return tuple(results)


def _sent_by(settings: Settings, blocks: int) -> Condition:
    """Return the condition in which units send activations, or would with heads on the server. If
    the scheduler chooses precisions, the finest one is taken."""
    precision = settings.compression.activation
    return Condition(
        "trained",
        settings.framework.cut or blocks,
        RowsRead.by(settings.model).reads,
        "float32" if precision == "auto" else precision,
    )


def _by_cut(
    held: Material, sent: Condition, state: State, encoder: Encoder
) -> Iterator[list[Recovery]]:
    """Yield the recovery after each number of blocks, from the rows of all tokens.

    At the cut of ``sent`` also yield recoveries for each precision, with noise, and from only the
    rows of ``sent``.
    """
    public, private = (
        encoder.activations(texts, held.generator("dropout", side) if state == "trained" else None)
        for side, texts in (("public", held.public), ("private", held.private))
    )
    table = inverters.table_of(encoder, held.tokenizer.vocabulary.size)
    for blocks, rows in enumerate(zip(public, private, strict=True)):
        middle = replace(sent, state=state, blocks=blocks, reads="real")
        whole, varied = [middle], list[Condition]()
        if blocks == sent.blocks:
            if sent.reads in ("first", "labelled"):
                whole.append(replace(middle, reads=sent.reads))
            varied += [replace(middle, precision=each) for each in get_args(Precision)]
            varied += [replace(middle, noise=noise) for noise in _NOISES]
        yield [
            recovery
            for condition in dict.fromkeys(whole + varied)
            for recovery in _recoveries(held, encoder, table, condition, rows, condition in whole)
        ]


def _recoveries(
    held: Material,
    encoder: Encoder,
    table: Tensor,
    condition: Condition,
    rows: tuple[Tensor, Tensor],
    whole: bool,
) -> Iterator[Recovery]:
    """Return recoveries from private activations [n, d], given public ones to fit attacks on. Noise
    and rounding are applied here. Without ``whole``, only fitted attacks are used."""
    size, texts = len(table), held.private
    public, private = (
        travelled(each, condition.precision, condition.noise, held.generator("wire", side))
        for side, each in zip(("public", "private"), rows, strict=True)
    )
    pooled = condition.reads == "first"
    known = _known(held.public, public, pooled)
    seed = derive(held.settings.seed, "audit", "learned")
    attacks: dict[Attack, Inverter] = {
        "softmax": inverters.softmax(known, size, seed),
        "linear": inverters.linear(known, table),
        "learned": inverters.learned(known, table, seed),
    }
    if whole:
        attacks["most frequent"] = inverters.most_frequent(known, size)
        attacks["nearest"] = inverters.nearest(encoder)
    rare = texts.real & ~frequent(held.public.ids[held.public.real], size)[texts.ids]
    sent = texts.sent(RowsRead(condition.reads))
    for name, inverter in attacks.items():
        hits = (_hits_of_texts if pooled else _hits)(texts, private, sent, inverter, size)
        every, others = (
            share_of(texts.by_row(hits & counted), texts.by_row(counted))
            for counted in (texts.real, rare)
        )
        assert every is not None  # there are real tokens
        yield Recovery(condition, name, every, others)


def _known(texts: Texts, rows: Tensor, pooled: bool) -> Public:
    """Return the attacker's public data from rows [n, d]."""
    ids = texts.ids[texts.real]
    if pooled:
        return Public(rows[texts.places == 0], ids, texts.rows[texts.real])
    return Public(rows[texts.real], ids, torch.arange(len(ids)))


def _hits(texts: Texts, rows: Tensor, sent: Tensor, inverter: Inverter, size: int) -> Tensor:
    """Return whether each token [n] is the best guess for its row; False if it is not sent."""
    attacked = sent & texts.real
    guesses = best(inverter, rows[attacked], texts.places[attacked], size, 1)
    hits = torch.zeros_like(sent)
    hits[attacked] = guesses[:, 0] == texts.ids[attacked]
    return hits


def _hits_of_texts(
    texts: Texts, rows: Tensor, sent: Tensor, inverter: Inverter, size: int
) -> Tensor:
    """Return whether each token [n] is among the guesses for its text's first row.

    There are as many guesses as the text has tokens, a number that the server gets with the mask.
    """
    counts = texts.by_row(texts.real)
    guesses = best(inverter, rows[sent], texts.places[sent], size, int(counts.max()))
    guesses[torch.arange(guesses.shape[1]) >= counts[:, None]] = -1
    return (guesses[texts.rows] == texts.ids[:, None]).any(1)


def _targets(settings: Settings) -> str:
    """Return sentences about the targets and the counts that the server receives."""
    least, words = settings.data.tokenizer_min_rows, ""
    if sends_words(settings):
        words = f"word of at least {least} rows and each " if least > 1 else "word and each "
    counts = f"At the start units report how often each {words}label, if any, occurs in their rows."
    if not settings.server_has_heads:
        return f"No target is sent. {counts}"
    named = _TEXTS.get(settings.task.heads[0], "the target texts")
    often = " whenever the scheduler has the head on the server" if settings.chooses_heads else ""
    return (
        f"Targets, {named}, are sent in the clear{often}: all of them are read without an attack. "
        f"{counts}"
    )


def _hidden(settings: Settings) -> str:
    """Return sentences about what masks and noise hide from the server; empty without both."""
    chosen, sentences, what = settings.privacy, list[str](), "updates"
    if chosen.secure_aggregation:
        sentences.append("This run's units mask theirs: the server gets sums alone.")
        what = "sums"
    if chosen.noise_multiplier:
        when = "with" if chosen.noise_by == "units" else "before"
        noise = f"privacy.noise_multiplier={chosen.noise_multiplier:g}"
        sentences.append(f"The server sees {what} {when} the run's noise of {noise}.")
    return " ".join(sentences)
