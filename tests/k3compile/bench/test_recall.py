"""Scoring: a right answer counts, one wrong token is a wrong answer, and an error is no score at all."""

from types import SimpleNamespace

import pytest
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.engine import QueueFull
from k3compile.runtime.tokenizer import Tokenizer
from k3compile.runtime.updates import Update

from k3compile import LLM
from k3compile.bench.recall import Problem, accuracy, answers, bench, generate, right, table, tasks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("random") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


class Scripted:
    """An engine of two places that says what it is told to, one token a step, the last request first."""

    def __init__(self, said):
        self.said, self.running = said, []

    def submit(self, request, on_update):
        if len(self.running) == 2:
            raise QueueFull("full")
        self.running.append((list(self.said(request.prompt)), on_update))

    def step(self):
        for pair in reversed(list(self.running)):
            tokens, on_update = pair
            token = tokens.pop(0)
            finish = "stop" if not tokens else None
            if finish:
                self.running.remove(pair)
            on_update(Update("x", [token], None, finish, None, 1, 1))
        return bool(self.running)


def knows(tokenizer, count, spoil=()):
    """What the right answers are, by prompt; those of the tasks in ``spoil`` end one token early."""
    known = {}
    for task in tasks:
        for problem in generate(task, count, 3):
            ids = problem.answer_ids(tokenizer)
            known[tuple(problem.prompt_ids(tokenizer))] = ids[:-1] if task in spoil else ids
    return lambda prompt: known[tuple(prompt)]


def test_right_answers_count_and_an_answer_without_its_stop_token_does_not(tokenizer):
    engine = Scripted(knows(tokenizer, 5, spoil=("copy", "tool")))
    found = accuracy(SimpleNamespace(engine=engine, tokenizer=tokenizer), count=5, seed=3)
    assert found == {task: 0.0 if task in ("copy", "tool") else 1.0 for task in tasks}


def test_one_wrong_token_is_a_wrong_answer(tokenizer):
    [problem] = generate("sum", 1, 0, form="plain")
    ids = problem.answer_ids(tokenizer)
    assert right(problem, ids, tokenizer)
    assert not right(problem, [ids[0] ^ 1, *ids[1:]], tokenizer)
    assert not right(problem, [*ids, ids[-1]], tokenizer)


def test_a_text_is_right_however_it_is_cut_into_tokens(tokenizer):
    problem = Problem("sum", "plain", "5+7=", "12")
    digits = [*tokenizer.encode("1"), *tokenizer.encode("2"), tokenizer.stop_id]
    assert digits != problem.answer_ids(tokenizer)
    assert right(problem, digits, tokenizer)


def test_a_request_that_fails_is_no_wrong_answer(tokenizer):
    class Failing(Scripted):
        def step(self):
            self.running.pop()[1](Update("x", [], None, "error", "out of pages", 1, 0))

    with pytest.raises(RuntimeError, match="problem 0: out of pages"):
        answers(Failing(lambda prompt: [1]), tokenizer, generate("sum", 1))


@pytest.mark.slow
def test_random_weights_know_nothing_and_are_served_to_the_end(folder, tokenizer):
    llm = LLM(folder, compile=False, max_num_seqs=2)
    assert accuracy(llm, names=("sum", "facts"), count=3) == {"sum": 0.0, "facts": 0.0}
    assert accuracy(llm.engine, tokenizer, names=("sum",), count=1) == {"sum": 0.0}
    assert not llm.engine.step()


@pytest.mark.slow
def test_the_table_has_a_line_for_each_task(folder):
    shares = bench(folder, 1, 0, {"max_num_seqs": 8})
    assert shares.keys() == set(tasks)
    assert table(shares, 1).row_count == len(tasks)
