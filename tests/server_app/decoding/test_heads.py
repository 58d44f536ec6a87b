"""The weights that a round's heads share with the model, and those that they copy."""

from decoder_session import VOCABULARY, decoder_session

from collapipe.models.part import prefixed
from collapipe.models.split import HEAD
from server_app.decoding.heads import Heads


def test_only_a_heads_own_frozen_weights_are_shared() -> None:
    """An encoder's frozen weight may have the same name as a trained weight of the head."""
    settings = decoder_session(0, 1).settings
    initial = settings.model.build_head(VOCABULARY).state_dict()
    frozen, trained = list(initial)[:2]
    fixed = {frozen: initial.pop(frozen)}
    heads = Heads(settings, VOCABULARY, None, lambda *step: None, fixed)
    weights = prefixed(HEAD, initial) | {frozen: initial[trained]}
    built = heads._build(weights, 0).module.state_dict()
    initial |= fixed
    shared = {name for name in built if built[name].data_ptr() == initial[name].data_ptr()}
    assert shared == {frozen}
