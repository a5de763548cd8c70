"""The corpus holds what its opening sentence promises."""

import unicodedata

from k3compile.runtime.tokenizer_corpus import CODE, CORPUS, SCRIPTS


def test_the_other_scripts_are_really_there():
    found = {unicodedata.name(char, "").split(" ")[0] for char in SCRIPTS}
    wanted = {
        "LATIN",
        "CYRILLIC",
        "GREEK",
        "ARABIC",
        "HEBREW",
        "DEVANAGARI",
        "THAI",
        "CJK",
        "HIRAGANA",
        "HANGUL",
    }
    assert wanted <= found


def test_the_text_is_composed_so_that_equal_words_are_equal_bytes():
    assert all(unicodedata.is_normalized("NFC", text) for text in CORPUS)


def test_the_python_of_the_code_sample_is_python():
    python = CODE[: CODE.index("function add")]
    compile(python, "sample", "exec")
