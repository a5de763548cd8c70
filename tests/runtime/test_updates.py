"""What an owner is told, and that one who does not listen hurts nobody."""

from k3compile.runtime.request import Request
from k3compile.runtime.updates import Live, Update


def test_an_update_counts_prompt_output_and_what_the_cache_had():
    request, heard = Request("a", [1, 2, 3]), []
    request.tokens.extend([7, 8])
    request.cached_tokens = 2
    assert Live(request, heard.append).tell([8], None, "length", None)
    assert heard == [Update("a", [8], None, "length", None, 3, 2, 2)]


def test_a_listener_that_raises_is_reported_and_not_passed_on():
    def bad(update):
        raise KeyError("gone")

    assert not Live(Request("a", [1]), bad).tell([], None, None, None)


def test_after_a_finish_nothing_more_is_told():
    heard = []
    live = Live(Request("a", [1]), heard.append)
    assert live.tell([], None, "error", "rank 1 is gone")
    assert live.tell([7], None, None, None)
    assert live.tell([], None, "abort", None)
    assert [(update.tokens, update.finish) for update in heard] == [([], "error")]
