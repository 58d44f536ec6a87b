"""A decoder session of the server, for a unit with a two-block model and rounds of two steps."""

from contextlib import nullcontext

from collapipe import config
from collapipe.config import Settings
from collapipe.models.part import HeadPart
from collapipe.models.split import HEAD
from collapipe.text.vocabulary import Vocabulary
from collapipe.wire.compression.feedback import ActivationMemory, ChangeCoder
from server_app.decoding.decoder import DecoderSession

VOCABULARY = Vocabulary(20, 0, 1, 2)
_OPTIONS = (
    "model.num_blocks=2",
    "model.num_decoder_blocks=1",
    "model.dim=8",
    "model.num_heads=2",
    "model.feed_forward_dim=8",
    "model.dropout=0",
    "optimizer.lr=1e-3",
    "optimizer.warmup_steps=0",
    "optimizer.decay=constant",
    "federation.local_steps=2",
    "batch_size=4",
)


def decoder_session(unit: int, round_: int, *overrides: str) -> DecoderSession:
    """Return a session with its own head that waits for no other unit; the unit has three rows."""
    return session_with(decoder_settings(*overrides), unit, round_)


def decoder_settings(*overrides: str) -> Settings:
    return config.load_overrides([*_OPTIONS, *overrides])


def session_with(settings: Settings, unit: int, round_: int) -> DecoderSession:
    """Return a session as ``decoder_session`` does."""
    part = HeadPart(HEAD, settings.model.build_head(VOCABULARY), settings.optimizer)
    coder = ChangeCoder(ActivationMemory(), round_, 3)
    return DecoderSession(
        *(settings, unit, round_, VOCABULARY.size, part, nullcontext(), lambda *step: None),
        activation=settings.compression.activation,
        gradient=settings.compression.gradient,
        coder=coder if settings.compression.feedback else None,
    )
