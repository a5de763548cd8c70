"""The JSON of /v1/chat/completions, whole or in chunks, from the same pieces.

Thoughts go out as ``reasoning_content``, and under vLLM's newer name ``reasoning``; the content never
holds them. Chunks of a choice: role, deltas in order, a last one with the finish reason.
"""

from __future__ import annotations

from ..parse import Delta, ToolCall
from .answer import Piece
from .job import Job
from .logprobs import LogprobWriter, merged


class ChatShape:
    """Writes one job. logprobs: whether they were asked for; reasoning: whether thoughts are sent."""

    def __init__(
        self, job: Job, model: str, writers: list[LogprobWriter], *, logprobs: bool, reasoning: bool
    ):
        self._job = job
        self._head = {"id": job.id, "object": "chat.completion", "created": job.created, "model": model}
        self._writers = writers
        self._logprobs = logprobs
        self._reasoning = reasoning
        self._deltas: list[list[Delta]] = [[] for _ in job.answers]
        self._entries: list[list[dict]] = [[] for _ in job.answers]
        self._unsent: list[list[dict]] = [[] for _ in job.answers]

    def opening(self) -> list[dict]:
        """The first chunk of every choice."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta) for index in range(len(self._job.answers))]

    def chunks(self, index: int, piece: Piece) -> list[dict]:
        """Chunks of one piece; log-probabilities of tokens that show nothing yet wait for the next chunk."""
        answer = self._job.answers[index]
        if self._logprobs and piece.logprobs:
            self._unsent[index].append(self._writers[index].chat(piece.logprobs))
        out = [self._chunk(index, self._delta(delta)) for delta in self._visible(piece)]
        if answer.finish_reason is not None:
            out.append(self._chunk(index, {}))
            out[-1]["choices"][0].update(finish_reason=answer.finish_reason, stop_reason=answer.stop_reason)
        if out and self._unsent[index]:
            out[0]["choices"][0]["logprobs"] = merged(self._unsent[index])
            self._unsent[index] = []
        return out

    def add(self, index: int, piece: Piece) -> None:
        """Keep a piece for :meth:`whole`."""
        self._deltas[index] += self._visible(piece)
        if self._logprobs and piece.logprobs:
            self._entries[index].append(self._writers[index].chat(piece.logprobs))

    def whole(self) -> dict:
        """The response of a job that has ended."""
        choices = [self._choice(index) for index in range(len(self._job.answers))]
        return {**self._head, "choices": choices, "usage": self._job.usage()}

    def ending(self) -> dict:
        """The chunk that carries the usage: no choices."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._job.usage()}

    def _visible(self, piece: Piece) -> list[Delta]:
        return [d for d in piece.deltas if self._reasoning or d.channel != "reasoning"]

    def _chunk(self, index: int, delta: dict) -> dict:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _delta(self, delta: Delta) -> dict:
        if delta.channel == "reasoning":
            return {"reasoning_content": delta.text, "reasoning": delta.text}
        if delta.call is not None:
            return {"tool_calls": [{"index": delta.call.index, **self._call(delta.call)}]}
        return {"content": delta.text}

    def _call(self, call: ToolCall) -> dict:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{self._job.id[-24:]}_{call.index}", "type": "function", "function": function}

    def _choice(self, index: int) -> dict:
        answer, deltas = self._job.answers[index], self._deltas[index]
        text = {
            name: "".join(d.text for d in deltas if d.channel == name) for name in ("content", "reasoning")
        }
        calls = [self._call(delta.call) for delta in deltas if delta.call is not None]
        message: dict = {"role": "assistant", "content": text["content"], "refusal": None}
        if text["reasoning"]:
            message |= {"reasoning_content": text["reasoning"], "reasoning": text["reasoning"]}
        if calls:
            message |= {"tool_calls": calls, "content": text["content"] or None}
        logprobs = None
        if self._logprobs:
            logprobs = merged(self._entries[index]) or {"content": [], "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
