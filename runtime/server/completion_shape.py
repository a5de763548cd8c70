"""The JSON of /v1/completions, whole or in chunks, from the same pieces."""

from __future__ import annotations

from .answer import Piece
from .job import Job
from .logprobs import LogprobWriter, merged


class CompletionShape:
    """Writes one job. echoes: text in front of each choice. logprobs: whether they were asked for."""

    def __init__(self, job: Job, model: str, writers: list[LogprobWriter], echoes: list[str], logprobs: bool):
        self._job = job
        self._head = {"id": job.id, "object": "text_completion", "created": job.created, "model": model}
        self._writers = writers
        self._echoes = echoes
        self._logprobs = logprobs
        self._texts = [[echo] for echo in echoes]
        self._entries: list[list[dict]] = [[] for _ in job.answers]
        self._unsent: list[list[dict]] = [[] for _ in job.answers]

    def opening(self) -> list[dict]:
        """A chunk for every choice that echoes its prompt."""
        return [self._chunk(index, echo) for index, echo in enumerate(self._echoes) if echo]

    def chunks(self, index: int, piece: Piece) -> list[dict]:
        """At most one chunk; log-probabilities of tokens that show nothing yet wait for the next."""
        answer = self._job.answers[index]
        if self._logprobs and piece.logprobs:
            self._unsent[index].append(self._writers[index].completion(piece.logprobs))
        text = text_of(piece)
        if not text and answer.finish_reason is None:
            return []
        chunk = self._chunk(index, text)
        chunk["choices"][0].update(finish_reason=answer.finish_reason, stop_reason=answer.stop_reason)
        if self._unsent[index]:
            chunk["choices"][0]["logprobs"] = merged(self._unsent[index])
            self._unsent[index] = []
        return [chunk]

    def add(self, index: int, piece: Piece) -> None:
        """Keep a piece for :meth:`whole`."""
        self._texts[index].append(text_of(piece))
        if self._logprobs and piece.logprobs:
            self._entries[index].append(self._writers[index].completion(piece.logprobs))

    def whole(self) -> dict:
        """The response of a job that has ended."""
        choices = []
        for index, answer in enumerate(self._job.answers):
            chunk = self._chunk(index, "".join(self._texts[index]))["choices"][0]
            chunk["logprobs"] = merged(self._entries[index]) or None
            chunk.update(finish_reason=answer.finish_reason, stop_reason=answer.stop_reason)
            choices.append(chunk)
        return {**self._head, "choices": choices, "usage": self._job.usage()}

    def ending(self) -> dict:
        """The chunk that carries the usage: no choices."""
        return {**self._head, "choices": [], "usage": self._job.usage()}

    def _chunk(self, index: int, text: str) -> dict:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return {**self._head, "choices": [choice]}


def text_of(piece: Piece) -> str:
    return "".join(delta.text for delta in piece.deltas)
