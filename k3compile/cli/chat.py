"""`k3 chat [DIR|URL]`: talk to a checkpoint in this process, or to any server with OpenAI's API."""

from __future__ import annotations

import itertools
import json
import queue
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..serving import plan
from .loading import drafts_of, load, log_to_stderr, or_shipped

Talker = Callable[[list[dict]], Iterator[tuple[str, str]]]  # messages -> (channel, text) as it comes

HELP = "/reset forgets the conversation, /quit (or Ctrl-D) ends it, Ctrl-C stops an answer"


def chat(
    where: Annotated[
        str | None, typer.Argument(help="A checkpoint folder, or http://host:port/v1; default: the tiny one.")
    ] = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Say this and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model think first.")] = True,
    effort: Annotated[str, typer.Option(help="How much: low, high, max.")] = "max",
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer, thoughts included.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    api_key: Annotated[str, typer.Option(help="For a server that wants one.")] = "none",
) -> int:
    """Talk to a checkpoint or a server, thoughts in grey."""
    settings = {"max_tokens": max_tokens, "temperature": temperature}
    if where is not None and where.startswith(("http://", "https://")):
        effort = effort if thinking else "none"
        talk = remote(where.rstrip("/"), api_key, {**settings, "reasoning_effort": effort})
    else:
        log_to_stderr("warning")
        talk = local(or_shipped(where), thinking, effort, settings)
    messages = [{"role": "system", "content": system}] if system else []
    console = Console(highlight=False)
    if message is not None:
        converse(console, talk, messages, message)
        return 0
    console.print(HELP, style="dim")
    while (line := ask(console)) is not None:
        if line == "/reset":
            del messages[1 if system else 0 :]
        elif line:
            converse(console, talk, messages, line)
    return 0


def ask(console: Console) -> str | None:
    """A line of the user's, or None at the end."""
    try:
        line = console.input("[bold]> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line == "/quit" else line


def converse(console: Console, talk: Talker, messages: list[dict], line: str) -> None:
    """One turn; an answer that is stopped half-way stays in the conversation as far as it came."""
    messages.append({"role": "user", "content": line})
    said = {"reasoning": "", "content": ""}
    try:
        for channel, text in talk(messages):
            said[channel] += text
            console.print(text, end="", style="dim" if channel == "reasoning" else None, markup=False)
    except KeyboardInterrupt:
        console.print(" [stopped]", end="", style="dim", markup=False)
    console.print()
    messages.append({"role": "assistant", "content": said["content"], "reasoning_content": said["reasoning"]})


def remote(url: str, api_key: str, settings: dict) -> Talker:
    """A talker for a server. Raises ``ValueError`` when it cannot be reached or says no."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}

    def open_url(path: str, body: dict | None) -> object:
        data = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=600)
        except urllib.error.HTTPError as error:
            hint = "; does the address end in /v1?" if error.code == 404 and body is None else ""
            said = error.read().decode(errors="replace")[:500]
            raise ValueError(f"{url}: {error.code} {said}{hint}") from None
        except OSError as error:
            raise ValueError(f"{url}: {error}") from None

    with open_url("/models", None) as answer:
        model = json.load(answer)["data"][0]["id"]

    def talk(messages: list[dict]) -> Iterator[tuple[str, str]]:
        body = {**settings, "model": model, "messages": messages, "stream": True}
        with open_url("/chat/completions", body) as events:
            for line in events:
                if line.startswith(b"data: {"):
                    yield from deltas_of(json.loads(line[6:]))

    return talk


def deltas_of(event: dict) -> Iterator[tuple[str, str]]:
    """(channel, text) of one event. Raises ``ValueError`` for an error event."""
    if "error" in event:
        raise ValueError(event["error"]["message"])
    for choice in event["choices"]:
        for channel, name in (("reasoning", "reasoning_content"), ("content", "content")):
            if choice["delta"].get(name):
                yield channel, choice["delta"][name]


def local(path: Path, thinking: bool, effort: str, settings: dict) -> Talker:
    """A talker with an engine in this process, uncompiled: the first answer should come at once, and a turn
    runs only what the turns before it did not.
    """
    from ..runtime.chat import render
    from ..runtime.engine_config import EngineConfig
    from ..runtime.request import Request, SamplingParams
    from ..runtime.server.answer import Answer, ChatReader

    params = SamplingParams(**settings)
    config = EngineConfig(max_num_seqs=1, prefix_cache=True, num_drafts=drafts_of(None, path))
    serving = plan(config, checkpoint=path, compiled=False)
    _, engine, tokenizer, _ = load(path, serving.engine, draft=serving.draft)
    engine.start()
    turns = itertools.count()

    def talk(messages: list[dict]) -> Iterator[tuple[str, str]]:
        prompt = tokenizer.encode_segments(render(messages, thinking=thinking, effort=effort))
        request = Request(f"turn-{next(turns)}", prompt, params)
        updates: queue.Queue = queue.Queue()
        answer = Answer(ChatReader(tokenizer, thinking))
        engine.submit(request, updates.put)
        try:
            while answer.finish_reason is None:
                for delta in answer.take(updates.get()).deltas:
                    yield ("reasoning" if delta.channel == "reasoning" else "content"), delta.text
        finally:
            engine.abort(request.id)
        if answer.error:
            raise ValueError(answer.error)

    return talk
