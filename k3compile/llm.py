"""The offline front door: a checkpoint folder in, texts out, no server and no thread.

    from k3compile import LLM, SamplingParams
    llm = LLM("checkpoints/k3-tiny", max_num_seqs=8)
    [answer] = llm.generate("Once", SamplingParams(temperature=0, max_tokens=20))
    [answer] = llm.chat([{"role": "user", "content": "Hello"}])

Texts are read by the code that the server reads them with, so both give the same answers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

from .cli.loading import drafts_of, load, or_shipped
from .features import nearest
from .options import CompileOptions
from .options import parse as parse_options
from .runtime.chat import render
from .runtime.engine import QueueFull, Update
from .runtime.engine_config import EngineConfig
from .runtime.parse import ToolCall
from .runtime.request import Request
from .runtime.sampler import TokenLogprobs
from .runtime.sampling_params import SamplingParams
from .runtime.server.answer import Answer, ChatReader, Reader, TextReader
from .runtime.text_stream import TextStream
from .serving import SET_BY_FEATURES, plan

log = logging.getLogger(__name__)

DEFAULT_PARAMS = SamplingParams(max_tokens=256)
Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True)
class Usage:
    """Tokens of one answer; completion_tokens includes a stop token and what was thought."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True)
class RequestOutput:
    """One answer. finish_reason: "stop", "length", "tool_calls" or "error" (then ``error`` says why).

    text: without stop string and, for a chat, without what was thought (reasoning) and called (tool_calls).
    token_ids: all tokens that count, the stop token included. logprobs: one entry a token, if asked for.
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None
    usage: Usage
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None


class Growing:
    """An answer while the engine works on it."""

    def __init__(self, request: Request, reader: Reader) -> None:
        self.request = request
        self.answer = Answer(reader, request.params.stop_token_ids)
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.parts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self.calls: list[ToolCall] = []

    @property
    def done(self) -> bool:
        return self.answer.finish_reason is not None

    def take(self, update: Update) -> None:
        before = self.answer.num_tokens
        piece = self.answer.take(update)
        self.tokens += update.tokens[: self.answer.num_tokens - before]
        self.logprobs += piece.logprobs
        for delta in piece.deltas:
            if delta.call is not None:
                self.calls.append(delta.call)
            else:
                self.parts[delta.channel].append(delta.text)

    def output(self) -> RequestOutput:
        answer, params = self.answer, self.request.params
        return RequestOutput(
            prompt_token_ids=self.request.prompt,
            text="".join(self.parts["content"]),
            token_ids=self.tokens,
            finish_reason=answer.finish_reason,
            logprobs=None if params.logprobs is None else self.logprobs,
            usage=Usage(
                self.request.prompt_tokens,
                answer.num_tokens,
                answer.cached_tokens,
                answer.reader.reasoning_tokens,
            ),
            reasoning="".join(self.parts["reasoning"]),
            tool_calls=tuple(self.calls),
            error=answer.error,
        )


class LLM:
    """A model in this process. Not thread-safe.

    path: a checkpoint folder (None: the trained tiny model that comes with the package). dtype: of
    activations and caches: float32, bfloat16 or float64. resident: of the weights in memory (None: dtype).
    compile: compile now (minutes when nothing is cached) or serve the model as it is written. options: a
    CompileOptions or its fields as a mapping; its ``features`` decide what is optimised. draft: folder of a
    DSpark draft, used when num_drafts is above 0 (None: draft/ in the checkpoint, or n-grams). Everything
    else is a field of EngineConfig; prefix_cache is on unless it is switched off. Raises ValueError saying
    all that is wrong with the checkpoint or the settings.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        dtype: str = "float32",
        resident: str | None = None,
        compile: bool = True,
        options: CompileOptions | Mapping[str, Any] | None = None,
        draft: str | Path | None = None,
        **engine: Any,
    ) -> None:
        options = options if isinstance(options, CompileOptions) else parse_options(options)
        path, draft = or_shipped(path), None if draft is None else Path(draft)
        engine["num_drafts"] = drafts_of(engine.get("num_drafts"), path)
        config = engine_config({"prefix_cache": True, **engine})
        serving = plan(config, options, checkpoint=path, draft=draft, compiled=compile)
        for line in serving.warnings:
            log.warning("%s", line)
        loaded = load(path, serving.engine, dtype, resident, serving.draft)
        self.model, self.engine, self.tokenizer = loaded.model, loaded.engine, loaded.tokenizer
        self._names = count()
        if compile:
            loaded.compile(serving.options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Continue prompts: one text, one list of ids, or several of either; the answers in their order.

        params: one for all or one for each (None: 256 tokens at temperature 1). stop: strings that end an
        answer. cache_salt: cached prefixes are shared only among calls with the same one. Raises ValueError,
        before anything runs, for a prompt or parameter that cannot be served.
        """
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]

        def reader(own: SamplingParams) -> Reader:
            stream = TextStream(self.tokenizer, stop, include_stop=include_stop, min_tokens=own.min_tokens)
            return TextReader(stream)

        return self._run(ids, params, reader, cache_salt)

    def chat(
        self,
        messages: Sequence[Mapping] | Sequence[Sequence[Mapping]],
        params: Params = None,
        *,
        thinking: bool = True,
        effort: str | None = "max",
        tools: Sequence[Mapping] | None = None,
        stop: Sequence[str] = (),
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answer one conversation or several, in OpenAI's message shapes.

        thinking: let the model think first; its thoughts come apart, as ``reasoning``. effort: low, high or
        max. stop: strings that end the content. cache_salt: as for :meth:`generate`, whose errors are these.
        """
        talks = [messages] if messages and isinstance(messages[0], Mapping) else messages
        ids = [
            self.tokenizer.encode_segments(render(talk, thinking=thinking, effort=effort, tools=tools))
            for talk in talks
        ]
        return self._run(
            ids,
            params,
            lambda own: ChatReader(self.tokenizer, thinking, stop, min_tokens=own.min_tokens),
            cache_salt,
        )

    def _run(self, prompts: list[list[int]], params: Params, reader: Any, salt: str) -> list[RequestOutput]:
        """Serve all prompts together and return when the last one is done."""
        params = DEFAULT_PARAMS if params is None else params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params for {len(prompts)} prompts: give one, or one for each")
        growing = [
            Growing(Request(f"llm-{next(self._names)}", prompt, own, cache_salt=salt), reader(own))
            for prompt, own in zip(prompts, each)
        ]
        for one in growing:
            self.engine.check(one.request)
        waiting = deque(growing)
        try:
            while waiting or not all(one.done for one in growing):
                while waiting and self._submit(waiting[0]):
                    waiting.popleft()
                self.engine.step()
        finally:
            self._drop(growing)
        return [one.output() for one in growing]

    def _submit(self, one: Growing) -> bool:
        def on_update(update: Update) -> None:
            if one.done:
                return  # ended by a stop string before the engine knew
            one.take(update)
            if one.done and update.finish is None:
                self.engine.abort(one.request.id, "stop")

        try:
            self.engine.submit(one.request, on_update)
        except QueueFull:
            return False
        return True

    def _drop(self, growing: list[Growing]) -> None:
        """End what an interruption left running, so that the next call starts with an empty engine."""
        for one in growing:
            self.engine.abort(one.request.id)
        while self.engine.step():
            pass


def engine_config(fields_given: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig from keywords. Raises ValueError for an unknown one, naming the nearest."""
    known = [f.name for f in fields(EngineConfig) if f.name not in SET_BY_FEATURES]
    if wrong := sorted(set(fields_given) & set(SET_BY_FEATURES)):
        raise ValueError(f"{', '.join(wrong)}: name it in the features of options, where it is switched")
    unknown = [f"{name!r}{nearest(name, known)}" for name in fields_given if name not in known]
    if unknown:
        raise ValueError(f"unknown engine setting {', '.join(unknown)}; known: {', '.join(known)}")
    return EngineConfig(**fields_given)
