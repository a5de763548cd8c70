"""Learning small vocabularies: deterministic, consistent with the encoder, useful."""

import hashlib
import time

import pytest
from k3compile.runtime.tokenizer import Tokenizer
from k3compile.runtime.tokenizer_train import train_bpe


def tokenizer(folder, data):
    (folder / "tiktoken.model").write_bytes(data)
    return Tokenizer(folder)


def test_the_preset_vocabularies_never_change_by_accident():
    digests = {ranks: hashlib.sha256(train_bpe(None, ranks)).hexdigest()[:16] for ranks in (768, 3840)}
    assert digests == {768: "cef410962bd58848", 3840: "2b15ca6396242cfd"}


def test_both_presets_are_learned_within_five_seconds():
    start = time.perf_counter()
    assert len(train_bpe(None, 3840).splitlines()) == 3840
    assert time.perf_counter() - start < 5


def test_merges_come_in_order_of_frequency_and_ties_go_to_the_smaller_bytes(tmp_path):
    data = train_bpe(["ab ab ab cd cd xy xy"], 260)
    tok = tokenizer(tmp_path, data)
    # "ab" is seen three times; then " ab", " c", " x", "cd" and "xy" are all seen twice
    assert [tok.decode([rank]) for rank in range(256, 260)] == ["ab", " ab", " c", " cd"]


@pytest.mark.parametrize("num_ranks", [257, 300, 768])
def test_every_learned_token_is_reached_by_the_encoder(tmp_path, num_ranks):
    tok = tokenizer(tmp_path, train_bpe(None, num_ranks))
    for rank in range(256, num_ranks):
        assert tok._encoding.encode_single_token(tok.decode_bytes([rank])) == rank
        assert tok._encoding._encode_single_piece(tok.decode_bytes([rank])) == [rank]


@pytest.mark.slow
def test_english_and_code_take_fewer_tokens_than_bytes(tmp_path):
    tok = tokenizer(tmp_path, train_bpe(None, 768))
    text = "She wrote the name of every ship.\nfor index in range(10):\n    print(index)\n"
    assert len(tok.encode(text)) < len(text) / 1.8


def test_too_few_ranks_and_too_little_text_are_refused():
    with pytest.raises(ValueError, match="num_ranks is 255"):
        train_bpe(None, 255)
    with pytest.raises(ValueError, match="the texts support 258 ranks, not 300"):
        train_bpe(["abc"], 300)
