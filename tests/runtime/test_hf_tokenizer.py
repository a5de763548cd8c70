"""The tokenizer.json beside a checkpoint encodes as tiktoken.model does."""

import pytest
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.hf_tokenizer import byte_characters, merges
from k3compile.runtime.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "The capital of France is Paris, isn't it?  We'LL see\n\n\tdef f(x):\r\n    return x + 12345",
    "Ünïcödé straße ÀÉÎ čeština Ελληνικά русский 한국어",
    "漢字かな交じり文。中文字符 mixed with english汉字",
    "emoji 👩‍👩‍👧‍👦 and zero\u200bwidth \u00a0 no-break",
    "a" * 300,
    "".join(chr(i) for i in range(1, 128)),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("k3") / "tiny")


@pytest.mark.oracle
def test_hugging_face_tokenizers_gives_the_same_ids_and_text(tiny):
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_file(str(tiny / "hf-tokenizer" / "tokenizer.json"))
    ours = Tokenizer(tiny)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ids == ours.encode(text), text
        assert theirs.decode(ids, skip_special_tokens=False) == text
    assert theirs.get_vocab_size() == ours.vocab_size
    assert {name: theirs.token_to_id(name) for name in ours.control_ids} == dict(ours.control_ids)


@pytest.mark.oracle
def test_transformers_loads_the_folder_and_stops_at_the_end_of_a_message(tiny):
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(tiny / "hf-tokenizer")
    assert loaded.eos_token_id == Tokenizer(tiny).stop_id
    assert loaded("Hello, how are you?")["input_ids"] == Tokenizer(tiny).encode("Hello, how are you?")


def test_every_byte_has_its_own_printable_character():
    spell = byte_characters()
    assert len(set(spell)) == 256
    assert all(len(one) == 1 and one.isprintable() and not one.isspace() for one in spell)
    assert (spell[ord("a")], spell[ord(" ")], spell[ord("\n")]) == ("a", "Ġ", "Ċ")


def test_a_token_is_joined_from_every_pair_of_tokens():
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"bc": 4, b"abc": 5}
    assert merges(ranks) == [(b"a", b"b"), (b"b", b"c"), (b"a", b"bc"), (b"ab", b"c")]
