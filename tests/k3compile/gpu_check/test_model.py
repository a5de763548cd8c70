"""Answers of two models are compared token by token, up to a tie; the compiled tiny model gives the same."""

import pytest

from k3compile.gpu_check.model import TIE, Answer, Asked, ask, check, difference, loaded, questions

NEAR, FAR = ((5, -0.5), (6, -0.5 - TIE / 2)), ((5, -0.5), (6, -0.5 - 2 * TIE))


@pytest.mark.parametrize(
    ("there", "best", "said"),
    [
        ([5, 7], FAR, "same"),
        ([6, 7], NEAR, "tie"),
        ([6, 7], FAR, "token 0 is 6 and not 5"),
        ([8, 7], NEAR, "token 0 is 8 and not 5"),
        ([5], FAR, "lengths differ"),
    ],
)
def test_how_answers_differ(there, best, said):
    assert difference(Answer([5, 7], [best, FAR]), Answer(there, [])) == said


def test_a_request_that_fails_is_raised():
    class Engine:
        def submit(self, request, listen):
            from k3compile.runtime.engine import Update

            listen(
                Update(
                    request.id,
                    tokens=[],
                    logprobs=None,
                    finish="error",
                    prompt_tokens=1,
                    completion_tokens=0,
                    error="no pages",
                )
            )

        def step(self):
            return False

    class Model:
        engine = Engine()

    with pytest.raises(RuntimeError, match="prompt 0: no pages"):
        ask(Model(), [Asked([1], 2)])


@pytest.mark.slow
def test_compiled_the_tiny_model_answers_as_uncompiled():
    found = check("cpu", inner="eager", of_each=1)
    assert (found["prompts"], found["same"] + found["tie"], found["wrong"]) == (6, 6, [])
    assert found["graphs"] == 4
    assert "k3.route" in found["choices"]


@pytest.mark.slow
def test_it_answers_right_so_that_wrong_kernels_would_be_seen():
    model = loaded()
    asked = questions(model.tokenizer, 1, ("sum", "copy"))
    for answer, one in zip(ask(model, asked), asked):
        assert len(answer.tokens) < one.max_tokens, "each ends by its stop token"
