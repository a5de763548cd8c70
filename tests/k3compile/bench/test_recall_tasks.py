"""The problems: the same ones from the same seed, and answers that an independent reading finds too."""

import json
import re

import pytest
from k3compile.runtime.checkpoint import write_tokenizer
from k3compile.runtime.parse import OutputParser
from k3compile.runtime.presets import PRESETS
from k3compile.runtime.tokenizer import Tokenizer

from k3compile.bench.recall_tasks import CAPITALS, DAYS, OPPOSITES, TALK, TASKS, WORDS, forms, generate


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, PRESETS["tiny"])
    return Tokenizer(folder)


def solve(question):
    """The right answer, read from the question alone."""
    if found := re.fullmatch(r"(?:What is )?(\d+)\+(\d+)[=?]", question):
        return str(int(found[1]) + int(found[2]))
    if found := re.fullmatch(r"Copy: (.*) =>", question):
        return found[1]
    if found := re.fullmatch(r"Remember: (.*); (\w+)=", question):
        return dict(pair.split("=") for pair in found[1].split(", "))[found[2]]
    if found := re.search(r"weather in (\w+)", question):
        return found[1]
    if question in TALK:
        return TALK[question]
    known = {f"capital of {a}": b for a, b in CAPITALS.items()}
    known |= {f"opposite of {a}": b for a, b in OPPOSITES.items()}
    known |= {f"day after {a}": b for a, b in zip(DAYS, [*DAYS[1:], DAYS[0]])}
    known |= {f"day is after {a}": b for a, b in zip(DAYS, [*DAYS[1:], DAYS[0]])}
    [about] = [about for about in known if re.search(rf"{about}\b", question)]
    return known[about]


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_problems_and_another_one_others(task):
    assert generate(task, 30, 5) == generate(task, 30, 5)
    assert generate(task, 30, 5) != generate(task, 30, 6)
    assert generate(task, 10, 5) == generate(task, 30, 5)[:10]


@pytest.mark.parametrize("task", TASKS)
def test_an_answer_is_what_the_question_alone_says(task):
    problems = generate(task, 200, 1)
    assert {p.form for p in problems} == set(forms(task))
    for problem in problems:
        said = problem.answer.strip()
        if task == "facts" and problem.question not in TALK:
            assert said.endswith(f"{solve(problem.question)}."), problem
        elif task in ("recall", "long") and problem.form != "plain":
            asked = problem.question.split("; ")[1]
            assert said == f"{asked}{solve(problem.question)}", problem
        elif task == "sum" and problem.form != "plain":
            asked = problem.question.removeprefix("What is ").rstrip("?=")
            assert said == f"{asked}={solve(problem.question)}", problem
        else:
            assert said == solve(problem.question), problem


def test_every_word_is_one_token_behind_a_space(tokenizer):
    assert len(set(WORDS)) == len(WORDS)
    assert [word for word in WORDS if len(tokenizer.encode(f" {word}")) != 1] == []


def test_a_long_list_covers_several_pages(tokenizer):
    assert all(len(p.prompt_ids(tokenizer)) > 2 * 64 for p in generate("long", 50, 3))


@pytest.mark.parametrize("task", TASKS)
def test_an_answer_ends_with_the_stop_token_and_holds_it_once(task, tokenizer):
    for problem in generate(task, 30, 2):
        ids = problem.answer_ids(tokenizer)
        assert ids[-1] == tokenizer.stop_id
        assert ids.count(tokenizer.stop_id) == 1


def read(tokenizer, problem):
    """The right answer of a chat as a server would read it: content, reasoning, calls."""
    parser = OutputParser(problem.settings["thinking"], tokenizer)
    deltas = [*parser.push(problem.answer_ids(tokenizer)), *parser.finish()]
    text = {c: "".join(d.text for d in deltas if d.channel == c) for c in ("content", "reasoning")}
    return text["content"], text["reasoning"], [d.call for d in deltas if d.call is not None]


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_of_a_chat_is_what_the_parser_of_the_server_reads(task, tokenizer):
    for problem in [p for p in generate(task, 60, 4) if p.form != "plain"]:
        content, reasoning, calls = read(tokenizer, problem)
        if task == "tool":
            assert [(c.name, json.loads(c.arguments)) for c in calls] == [
                ("get_weather", {"city": problem.answer})
            ]
            assert (content, reasoning) == ("", "")
        else:
            thought = problem.reply["reasoning_content"] if problem.settings["thinking"] else ""
            assert (content, reasoning, calls) == (problem.answer, thought, [])


def test_an_unknown_task_or_form_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match="there is no task 'sums'; there are recall, long"):
        generate("sums", 1)
    with pytest.raises(ValueError, match="task 'tool' has no form 'plain'; it has chat"):
        generate("tool", 1, form="plain")
