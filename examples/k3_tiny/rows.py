"""Training rows: problems one behind the other until a row is full, and which tokens are answers.

    | Remember: river=47, ...; wind= [13 <stop>] | 3+9= [12 <stop>] | <open>message ... [82 <close> ...] |

Only what stands in brackets is learned. A row uses a word once, so that what is recalled is never ambiguous;
a conversation asks several things, and so may a list of pairs.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from k3compile.runtime.chat import render
from k3compile.runtime.tokenizer import Tokenizer
from torch import Tensor

from k3compile.bench.recall_tasks import EFFORTS, WORDS, draw_pairs, make, remember


class Document(NamedTuple):
    """Tokens, and whether each is an answer."""

    tokens: list[int]
    learned: list[bool]


class Rows(NamedTuple):
    """A batch: what is read, what follows, and how much each place counts."""

    tokens: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64
    learned: Tensor  # [B, T] bool: the target is part of an answer


def batch(
    tokenizer: Tokenizer, kind: str, count: int, length: int, rng: random.Random, most: int = 20
) -> Rows:
    """``count`` rows of ``length`` tokens that begin with a document of ``kind``: "short", "thinking", "tool"
    or "long". most: pairs of a list.
    """
    tokens, learned = [], []
    for _ in range(count):
        one = row(tokenizer, kind, length + 1, rng, most)
        tokens.append(one.tokens[: length + 1])
        learned.append(one.learned[: length + 1])
    whole, mask = torch.tensor(tokens), torch.tensor(learned)
    return Rows(whole[:, :-1].contiguous(), whole[:, 1:].contiguous(), mask[:, 1:].contiguous())


def row(tokenizer: Tokenizer, kind: str, length: int, rng: random.Random, most: int) -> Document:
    """Documents until ``length`` tokens are there; the last one is cut."""
    tokens, learned, left = [], [], rng.sample(WORDS, len(WORDS))
    while len(tokens) < length:
        if len(left) < most:
            left = rng.sample(WORDS, len(WORDS))
        one = document(tokenizer, "short" if tokens else kind, rng, left, most)
        tokens += one.tokens
        learned += one.learned
    return Document(tokens, learned)


def document(tokenizer: Tokenizer, kind: str, rng: random.Random, left: list[str], most: int) -> Document:
    """Plain problems of one task, or a conversation. Words that it uses are taken from ``left``."""
    if kind == "long":
        return listing(tokenizer, rng, WORDS, rng.randint(32, 64), rng.choice(("plain", "chat")))
    if kind == "tool":
        return talk(tokenizer, "chat", ["tool"], rng, left, most)
    if kind == "thinking":
        tasks = rng.choices(("recall", "copy", "sum", "facts"), k=rng.randint(1, 2))
        return talk(tokenizer, rng.choice(EFFORTS), tasks, rng, left, most)
    task = rng.choices(("recall", "copy", "sum", "facts"), (4, 2, 4, 1))[0]
    if rng.random() < 0.5:
        if task == "recall" and rng.random() < 0.5:
            return listing(tokenizer, rng, left, rng.randint(2, most), "chat")
        tasks = [task, *rng.choices(("recall", "copy", "sum", "facts"), k=rng.randint(0, 2))]
        return talk(tokenizer, "chat", tasks, rng, left, most)
    if task == "recall":
        return listing(tokenizer, rng, left, rng.randint(2, most), "plain")
    several = Document([], [])
    for _ in range(rng.randint(2, 12) if task == "sum" else 1):  # a sum is short, and hard to learn
        problem = make(task, "plain", rng, left, most)
        take(left, problem.question)
        one = joined(problem.prompt_ids(tokenizer), problem.answer_ids(tokenizer))
        several = Document(several.tokens + one.tokens, several.learned + one.learned)
    return several


def take(left: list[str], text: str) -> None:
    """Words that were used are used up."""
    used = set(text.replace("=", " ").split())
    left[:] = [word for word in left if word not in used]


def joined(prompt: list[int], answer: list[int]) -> Document:
    return Document(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def listing(
    tokenizer: Tokenizer, rng: random.Random, words: list[str] | tuple[str, ...], count: int, form: str
) -> Document:
    """A list of pairs and several questions of it: their numbers are learned, and the stop of the last."""
    pairs = draw_pairs(rng, words, count)
    many = (1, 3) if form == "chat" else (1, 10)
    asked = rng.sample(list(pairs), min(count, rng.randint(*many) if count < 32 else 20))
    if isinstance(words, list):
        take(words, " ".join(pairs))
    if form == "chat":
        return conversation(tokenizer, pairs, asked)
    one = joined(tokenizer.encode(remember(pairs, asked[0])), tokenizer.encode(pairs[asked[0]]))
    for word in asked[1:]:
        more = joined(tokenizer.encode(f"; {word}="), tokenizer.encode(pairs[word]))
        one = Document(one.tokens + more.tokens, one.learned + more.learned)
    return Document([*one.tokens, tokenizer.stop_id], [*one.learned, True])


def conversation(tokenizer: Tokenizer, pairs: dict[str, str], asked: list[str]) -> Document:
    """The same as turns of a chat."""
    turns = [(remember(pairs, asked[0]), asked[0]), *((f"; {word}=", word) for word in asked[1:])]
    replies = [{"role": "assistant", "content": f" {word}={pairs[word]}"} for _, word in turns]
    return turns_of(tokenizer, [question for question, _ in turns], replies, {"thinking": False})


def talk(
    tokenizer: Tokenizer, form: str, tasks: list[str], rng: random.Random, left: list[str], most: int
) -> Document:
    """Several problems as the turns of one conversation."""
    problems = []
    for task in tasks:
        if len(left) < most:
            left[:] = rng.sample(WORDS, len(WORDS))
        problems.append(make(task, form, rng, left, most if form == "chat" else min(most, 8)))
        take(left, problems[-1].question)
    return turns_of(
        tokenizer, [p.question for p in problems], [p.reply for p in problems], problems[0].settings
    )


def turns_of(tokenizer: Tokenizer, questions: list[str], replies: list[dict], settings: dict) -> Document:
    """A conversation of which all replies are learned, markup and stop token included."""
    messages, tokens, learned = [], [], []
    for question, reply in zip(questions, replies):
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.encode_segments(render(messages, **settings))
        messages.append(reply)
        whole = tokenizer.encode_segments(render(messages, **settings, add_generation_prompt=False))
        learned += [False] * (len(prompt) - len(tokens)) + [True] * (len(whole) - len(prompt))
        tokens = whole
    return Document(tokens, learned)
