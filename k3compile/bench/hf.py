"""transformers' Kimi-Linear, random weights: eager, plain Inductor, and adopted with k3, in one run.

    forward    the prompt in one pass, no cache
    decode     one token a pass, greedy, after the prompt
    graphs     what Dynamo traces over several prompt lengths, of their model and of the adopted one

Their chunk loop is unrolled while it is traced, so plain Inductor takes minutes for one length of prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from ..adoption.layers import adopt
from .limits import Sample, interleaved
from .render import spread

MODES = ("eager", "inductor", "k3")
SIZES: dict[str, dict[str, int]] = {  # layers: three of KDA to one of MLA
    "tiny": {"layers": 4, "hidden": 64, "heads": 4, "width": 16, "experts": 4, "expert_width": 32},
    "small": {"layers": 8, "hidden": 256, "heads": 4, "width": 64, "experts": 8, "expert_width": 128},
    "medium": {"layers": 12, "hidden": 768, "heads": 6, "width": 128, "experts": 16, "expert_width": 256},
}
VOCABULARY = 1024


@dataclass(frozen=True)
class ModeResult:
    """One mode. Samples are seconds a pass; error: largest difference of a logit from eager's."""

    mode: str
    compile_seconds: float
    forward: Sample
    decode: Sample
    error: float


@dataclass(frozen=True)
class Result:
    """All modes of one size. graphs: of ``theirs`` and the ``adopted``, after each of :func:`lengths`."""

    size: str
    layers: int
    prompt: int
    threads: int
    modes: tuple[ModeResult, ...]
    graphs: dict[str, tuple[int, ...]]

    def to_json(self) -> dict[str, Any]:
        """Plain data, with every median as a ratio to eager's."""
        eager = self.modes[0]
        modes = {
            m.mode: {
                "compile_seconds": m.compile_seconds,
                "forward_seconds": spread(m.forward),
                "decode_seconds": spread(m.decode),
                "forward_speedup": eager.forward.median / m.forward.median,
                "decode_speedup": eager.decode.median / m.decode.median,
                "largest_logit_difference": m.error,
            }
            for m in self.modes
        }
        return asdict(self) | {"modes": modes, "lengths": lengths(self.prompt)}


def bench(
    size: str = "tiny",
    prompt: int = 128,
    decode: int = 16,
    rounds: int = 5,
    inductor: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Measure. decode: tokens of one round, reported a pass. say: called with each step begun.

    Raises ValueError without transformers, for an unknown size, and for a count below 1.
    """
    if size not in SIZES:
        raise ValueError(f"sizes are {', '.join(SIZES)} (unknown: {size})")
    given = {"prompt": prompt, "decode": decode, "rounds": rounds}
    if small := [f"{name} must be at least 1, got {n}" for name, n in given.items() if n < 1]:
        raise ValueError("; ".join(small))
    runs, compiling = {}, {}
    for mode in MODES if inductor else ("eager", "k3"):
        say(f"{mode}: first passes" + (", minutes of compiling" if mode == "inductor" else ""))
        runs[mode] = Runs(mode, make_model(size), prompt)
        began = time.perf_counter()
        runs[mode].warm_up()
        compiling[mode] = time.perf_counter() - began if mode != "eager" else 0.0
    say("rounds")
    forward = interleaved({m: r.forward for m, r in runs.items()}, rounds)
    steps = interleaved({m: (lambda r=r: r.decode(decode)) for m, r in runs.items()}, rounds)
    want = runs["eager"].forward()
    modes = tuple(
        ModeResult(
            mode,
            compiling[mode],
            forward[mode],
            Sample(tuple(seconds / decode for seconds in steps[mode].values)),
            (run.forward() - want).abs().max().item(),
        )
        for mode, run in runs.items()
    )
    say("graphs over lengths")
    graphs = graphs_over_lengths(prompt, ("theirs", "adopted") if inductor else ("adopted",))
    return Result(size, SIZES[size]["layers"], prompt, torch.get_num_threads(), modes, graphs)


def make_model(size: str, layers: int = 0) -> nn.Module:
    """A Kimi-Linear of transformers, the same random weights each time; layers: other than the size has.

    Raises ValueError without transformers.
    """
    try:
        from transformers import KimiLinearConfig, KimiLinearForCausalLM
    except ImportError as error:
        raise ValueError(
            f"this needs transformers with Kimi-Linear: pip install transformers ({error})"
        ) from error
    of = SIZES[size] | ({"layers": layers} if layers else {})
    torch.manual_seed(0)
    config = KimiLinearConfig(
        vocab_size=VOCABULARY,
        hidden_size=of["hidden"],
        intermediate_size=2 * of["hidden"],
        moe_intermediate_size=of["expert_width"],
        num_hidden_layers=of["layers"],
        layer_types=[kind_of_layer(i, of["layers"]) for i in range(of["layers"])],
        num_attention_heads=of["heads"],
        num_key_value_heads=of["heads"],
        linear_num_heads=of["heads"],
        linear_head_dim=of["width"],
        kv_lora_rank=of["hidden"] // 4,
        qk_nope_head_dim=of["width"],
        qk_rope_head_dim=8,
        v_head_dim=of["width"],
        num_local_experts=of["experts"],
        num_experts_per_tok=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return KimiLinearForCausalLM(config).float().eval()


def kind_of_layer(index: int, layers: int) -> str:
    """Each fourth layer attends, and the last one does: the cache counts its tokens in such a layer."""
    return "full_attention" if index % 4 == 3 or index == layers - 1 else "linear_attention"


def tokens(count: int) -> Tensor:
    """The prompt [1, count]."""
    return torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(0))


class Runs:
    """The passes of one mode; decoding goes on from where the last round stopped."""

    def __init__(self, mode: str, model: nn.Module, prompt: int) -> None:
        self.prompt = tokens(prompt)
        if mode == "k3":
            adopt(model)
        torch._dynamo.reset()
        backend = {"eager": None, "inductor": "inductor", "k3": "k3"}[mode]
        self.call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        self.cache: Any = None

    @torch.no_grad()
    def forward(self) -> Tensor:
        """Logits [P, vocabulary] of the prompt."""
        return self.call(self.prompt).logits[0]

    @torch.no_grad()
    def decode(self, count: int) -> Tensor:
        """``count`` tokens, each from the one before."""
        token = self.prompt[:, -1:]
        for _ in range(count):
            out = self.call(token, cache=self.cache, use_cache=True)
            self.cache, token = out.cache, out.logits[:, -1:].argmax(-1)
        return token

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile what the rounds need: the prompt, the prompt with a cache, and steps of a growing cache."""
        self.forward()
        self.cache = self.call(self.prompt, use_cache=True).cache
        self.decode(3)


@torch.no_grad()
def graphs_over_lengths(prompt: int, models: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Graphs after each of :func:`lengths`, of ``theirs`` and the ``adopted``; two layers tell."""
    counts = {}
    for name in models:
        model = make_model("tiny", 2)
        torch._dynamo.reset()
        traced = CompileCounter()
        call = torch.compile(adopt(model) if name == "adopted" else model, backend=traced, fullgraph=True)
        found = []
        for count in lengths(prompt):
            call(tokens(count))
            found.append(traced.frame_count)
        counts[name] = tuple(found)
    torch._dynamo.reset()
    return counts


def lengths(prompt: int) -> tuple[int, ...]:
    """Prompts that a server would meet one after the other."""
    return prompt, prompt + 5, 2 * prompt + 1, 3 * prompt


def table(result: Result) -> Table:
    """A row a mode: times, and how many times as fast as eager."""
    made = Table(
        title=f"Kimi-Linear of transformers, {result.size}: {result.layers} layers, prompt {result.prompt}"
    )
    for column in (
        "mode",
        "compile s",
        "forward ms",
        "x eager",
        "decode ms",
        "x eager",
        "largest logit error",
    ):
        made.add_column(column, justify="left" if column == "mode" else "right")
    for name, mode in result.to_json()["modes"].items():
        made.add_row(
            name,
            f"{mode['compile_seconds']:.1f}",
            f"{mode['forward_seconds']['median'] * 1e3:.1f}",
            f"{mode['forward_speedup']:.2f}",
            f"{mode['decode_seconds']['median'] * 1e3:.2f}",
            f"{mode['decode_speedup']:.2f}",
            f"{mode['largest_logit_difference']:.1e}",
        )
    return made


def graphs_line(result: Result) -> str:
    """How the number of graphs grows with the lengths met."""
    counts = ", ".join(f"{name} {list(counts)}" for name, counts in result.graphs.items())
    return f"graphs after prompts of {', '.join(map(str, lengths(result.prompt)))} tokens: {counts}"
