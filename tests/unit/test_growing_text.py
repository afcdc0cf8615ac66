"""Streamed text: its pieces together are the text of all tokens, cut before the first stop string, whatever the tokens are."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import SHIPPED
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.serve.text import GrowingText

TOKENIZER = load_tokenizer(SHIPPED)
TOKENS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30)
WORDS = st.text("ab< é😀", max_size=20).map(TOKENIZER.encode)


@settings(max_examples=150, derandomize=True)
@given(ids=st.one_of(TOKENS, WORDS), stop=st.text("ab< é😀", max_size=3), ahead=st.integers(1, 4))
def test_pieces_are_the_text_up_to_the_stop_string(ids, stop, ahead):
    text, sent = GrowingText(TOKENIZER.decode, [stop] if stop else []), ""
    for count in range(1, len(ids) + 1, ahead):
        sent += text.add(ids[:count])
        if text.stopped:
            break
    whole = TOKENIZER.decode(ids)
    sent += text.finish(ids)
    assert sent == text.text == (whole.partition(stop)[0] if stop else whole)
    assert text.stopped == bool(stop and stop in whole)
