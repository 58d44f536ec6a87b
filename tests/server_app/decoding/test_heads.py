"""What a round's heads share with the model, and what they copy."""

from decoder_session import VOCABULARY, decoder_session

from collapipe.models.part import prefixed
from collapipe.models.split import HEAD
from server_app.decoding.heads import Heads


def test_only_a_heads_own_frozen_weights_are_shared() -> None:
    """An encoder's frozen weight may have the name of one that trains in the head."""
    settings = decoder_session(0, 1).settings
    initial = settings.model.build_head(VOCABULARY).state_dict()
    frozen, trained = list(initial)[:2]
    names = {f"{HEAD}.{frozen}", trained}
    heads = Heads(settings, VOCABULARY, None, lambda *step: None, names)
    built = heads._build(prefixed(HEAD, initial), 0).module.state_dict()
    shared = {name for name in built if built[name].data_ptr() == initial[name].data_ptr()}
    assert shared == {frozen}
