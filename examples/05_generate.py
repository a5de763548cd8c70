"""Lesson 5: a checkpoint in the released format, made here, loaded, and asked two things at once."""

import tempfile
from pathlib import Path

from k3compile.runtime.checkpoint import make_checkpoint

from k3compile import LLM, SamplingParams

with tempfile.TemporaryDirectory() as folder:
    checkpoint = Path(folder) / "k3-tiny"
    make_checkpoint(checkpoint, "tiny", seed=0)  # random weights: the format is real, the words are not
    llm = LLM(checkpoint, compile=False)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    alone = [llm.generate(prompt, greedy)[0] for prompt in ("The state", "A page")]
    together = llm.generate(["The state", "A page"], greedy)

for one, both in zip(alone, together):
    print(repr(one.text), one.finish_reason, one.usage)
    assert one.token_ids == both.token_ids  # company changes nothing
