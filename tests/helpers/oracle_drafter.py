"""A drafter that knows the answers: it proposes as many right tokens as a test wants, then wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from k3compile.runtime.request import Request
from k3compile.runtime.speculate.draft import Draft


class OracleDrafter:
    """Proposes ``num_drafts`` tokens, of which the first right(request) are what greedy decoding gives.

    answers: the whole greedy output of a prompt, longer than anybody asks for. vocab: a wrong token is the
    right one plus 1, modulo this.
    """

    lookahead, taps = 0, ()

    def __init__(
        self,
        answers: Callable[[list[int]], Sequence[int]],
        vocab: int,
        num_drafts: int,
        right: Callable[[Request], int],
    ) -> None:
        self._answers, self._vocab, self._num, self._right = answers, vocab, num_drafts, right
        self._known: dict[tuple[int, ...], Sequence[int]] = {}
        self.proposed: list[str] = []  # ids, in order
        self.forgotten: list[str] = []

    def observe(self, step, taps) -> None: ...

    def propose(self, requests: Sequence[Request], holdings) -> list[Draft | None]:
        assert len(requests) == len(holdings)
        self.proposed += [r.id for r in requests]
        return [self._draft(request) for request in requests]

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.id)

    def _draft(self, request: Request) -> Draft:
        prompt = tuple(request.prompt)
        if prompt not in self._known:
            self._known[prompt] = self._answers(list(prompt))
        done = request.output_tokens
        tokens = list(self._known[prompt][done : done + self._num])
        assert len(tokens) == self._num, "the answer is too short"
        for i in range(self._right(request), self._num):
            tokens[i] = (tokens[i] + 1) % self._vocab
        return Draft(tokens)
