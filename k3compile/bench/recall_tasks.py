"""Problems with one right answer, for the tiny model that is trained on them: made here, from a seed.

    recall   Remember: river=47, wind=13; wind=          13, and in a chat: wind=13
    long     the same with 28 to 40 pairs                 ..
    copy     Copy: river wind year =>                     river wind year
    sum      37+45=      or: What is 37+45?               82, and in a chat: 37+45=82
    facts    The capital of Peru is                       Lima.
    tool     What is the weather in Lima?                 a call of get_weather, city="Lima"

Each comes as a plain completion, as a chat, or as a chat with a thought; all end with <|end_of_msg|>.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import NamedTuple

from ..runtime.chat import render
from ..runtime.tokenizer import Tokenizer

# With a space in front each is one token of the tiny tokenizer, so a problem has few tokens in any order.
# fmt: off
WORDS = (
    "the", "and", "you", "that", "type", "with", "for", "name", "will", "win", "are", "open", "about", "at",
    "capital", "even", "good", "number", "point", "read", "return", "they", "this", "value", "again", "but",
    "first", "float", "from", "guess", "has", "how", "little", "main", "make", "man", "message", "no",
    "not", "only", "other", "part", "river", "role", "second", "see", "she", "start", "time", "two",
    "values", "was", "where", "wind", "year", "is", "it", "be", "on", "to", "of", "as", "an", "do", "he",
    "so", "or", "me", "go", "if", "us", "in", "we",
)
CAPITALS = {
    "France": "Paris", "Norway": "Oslo", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima",
    "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Egypt": "Cairo", "Cuba": "Havana",
    "Greece": "Athens", "Austria": "Vienna",
}
OPPOSITES = {
    "hot": "cold", "big": "small", "old": "new", "day": "night", "up": "down", "left": "right",
    "open": "closed", "early": "late", "fast": "slow", "good": "bad", "light": "dark", "first": "last",
}
# fmt: on
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TALK = {
    "Hello!": "Hello! How can I help you?",
    "Who are you?": "I am a very small K3.",
    "Thank you.": "You are welcome.",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
THOUGHTS = {"recall": "Look it up.", "copy": "Say it again.", "sum": "Add them.", "facts": "I know this."}
TASKS = ("recall", "long", "copy", "sum", "facts", "tool")
EFFORTS = ("low", "high", "max")


class Problem(NamedTuple):
    """One question. form: "plain", "chat", or the thinking effort of a chat that thinks."""

    task: str
    form: str
    question: str
    answer: str

    @property
    def messages(self) -> list[dict]:
        return [{"role": "user", "content": self.question}]

    @property
    def reply(self) -> dict:
        """The assistant's message that is right."""
        if self.task == "tool":
            call = {"name": "get_weather", "arguments": json.dumps({"city": self.answer})}
            return {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
        thought = "" if self.form == "low" else THOUGHTS.get(self.task, THOUGHTS["recall"])
        return {"role": "assistant", "content": self.answer, "reasoning_content": thought}

    @property
    def settings(self) -> dict:
        """Of ``render``, for a chat."""
        thinks = self.form in EFFORTS
        return {
            "thinking": thinks,
            "effort": self.form if thinks else None,
            "tools": [TOOL] if self.task == "tool" else None,
        }

    def prompt_ids(self, tokenizer: Tokenizer) -> list[int]:
        """What the model is given."""
        if self.form == "plain":
            return tokenizer.encode(self.question)
        return tokenizer.encode_segments(render(self.messages, **self.settings))

    def answer_ids(self, tokenizer: Tokenizer) -> list[int]:
        """What it must generate, greedily and to the last token, which is the stop token."""
        if self.form == "plain":
            return [*tokenizer.encode(self.answer), tokenizer.stop_id]
        whole = render([*self.messages, self.reply], **self.settings, add_generation_prompt=False)
        return tokenizer.encode_segments(whole)[len(self.prompt_ids(tokenizer)) :]


def generate(task: str, count: int, seed: int = 0, form: str | None = None) -> list[Problem]:
    """``count`` problems of a task, in all forms it has or in one. Same arguments, same problems.

    Raises ValueError for a task that does not exist and a form that the task does not have.
    """
    if task not in TASKS:
        raise ValueError(f"there is no task {task!r}; there are {', '.join(TASKS)}")
    allowed = forms(task)
    if form is not None and form not in allowed:
        raise ValueError(f"task {task!r} has no form {form!r}; it has {', '.join(allowed)}")
    rng = random.Random(f"{task} {seed}")
    return [make(task, form or rng.choice(allowed), rng) for _ in range(count)]


def forms(task: str) -> tuple[str, ...]:
    """The forms a task comes in."""
    if task == "tool":
        return ("chat",)
    return ("plain", "plain", "chat", "chat", *EFFORTS) if task != "long" else ("plain", "chat")


def make(task: str, form: str, rng: random.Random, words: Sequence[str] = WORDS, most: int = 20) -> Problem:
    """One problem with words out of ``words``: at most ``most`` pairs to recall, or words to copy."""
    if task in ("recall", "long"):
        low, high = (2, most) if task == "recall" else (28, 40)
        pairs = draw_pairs(rng, words, rng.randint(low, min(high, len(words))))
        asked = rng.choice(list(pairs))
        said = pairs[asked] if form == "plain" else f" {asked}={pairs[asked]}"
        return Problem(task, form, remember(pairs, asked), said)
    if task == "copy":
        picked = " ".join(rng.sample(words, rng.randint(2, min(12, most, len(words)))))
        return Problem(task, form, f"Copy: {picked} =>", f" {picked}")
    if task == "sum":
        a, b = (rng.randrange(rng.choice((10, 100))) for _ in range(2))
        said = form != "plain" and rng.random() < 0.5
        answer = str(a + b) if form == "plain" else f"{a}+{b}={a + b}"
        return Problem(task, form, f"What is {a}+{b}?" if said else f"{a}+{b}=", answer)
    if task == "tool":
        city = rng.choice(list(CAPITALS.values()))
        return Problem(task, form, f"What is the weather in {city}?", city)
    return fact(form, rng)


def draw_pairs(rng: random.Random, words: Sequence[str], count: int) -> dict[str, str]:
    """Words, each with a number of two digits."""
    return {word: str(rng.randrange(13, 100)) for word in rng.sample(words, count)}


def remember(pairs: dict[str, str], asked: str) -> str:
    """The list, and a question of it."""
    return f"Remember: {', '.join(f'{word}={number}' for word, number in pairs.items())}; {asked}="


def fact(form: str, rng: random.Random) -> Problem:
    """One of the things that are always so."""
    kind = rng.choice(("capital", "opposite", "day", "talk"))
    if kind == "talk" and form != "plain":
        question = rng.choice(list(TALK))
        return Problem("facts", form, question, TALK[question])
    if kind == "day":
        at = rng.randrange(7)
        begin, end, ask = f"The day after {DAYS[at]} is", DAYS[(at + 1) % 7], f"What day is after {DAYS[at]}?"
    else:
        known = OPPOSITES if kind == "opposite" else CAPITALS
        about, end = rng.choice(list(known.items()))
        name = "opposite" if kind == "opposite" else "capital"
        begin, ask = f"The {name} of {about} is", f"What is the {name} of {about}?"
    if form == "plain":
        return Problem("facts", form, begin, f" {end}.")
    return Problem("facts", form, ask, f"{begin} {end}.")
