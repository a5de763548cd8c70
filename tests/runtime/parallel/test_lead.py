"""What is sent and when, and that nothing is run once a command has not ended on rank 0."""

from contextlib import contextmanager

import pytest
import torch
from k3compile.runtime.cache.orders import Clear, Copy, Fold, PoisonAll
from k3compile.runtime.executor import Executor, GroupLost
from k3compile.runtime.parallel.hooks import Unwatched
from k3compile.runtime.parallel.lead import Leader
from k3compile.runtime.parallel.recorder import Mark
from k3compile.runtime.parallel.wire import Ask, Stop, decode
from small_models import Row, make_step, small_model


class Sent:
    """A channel that keeps what it is given, or fails."""

    def __init__(self, fails=None):
        self.commands, self.fails = [], fails

    def send(self, numbers):
        if self.fails:
            raise self.fails
        self.commands.append(decode(numbers))


class Noted(Unwatched):
    def __init__(self):
        self.kinds = []

    @contextmanager
    def step(self, kind, rows=0):
        self.kinds.append(kind)
        yield
        self.kinds.append("end")

    def mark(self):
        return Mark(len(self.kinds), 5)


class Blocks:
    def __init__(self, error=None):
        self.error = error

    def run(self, *given):
        if self.error:
            raise self.error
        return given


STEP = make_step([Row([5, 6, 7], 1)])
ROWS = torch.tensor([2])


def leader(channel=None, blocks=None, forward=None):
    model = small_model()
    pools = model.make_pools(4, 5, 4, 3)
    forward = forward or (lambda step: model.forward(step, pools))
    executor = Executor(pools, forward, model.logits, blocks=blocks or Blocks())
    return Leader(executor, channel or Sent(), Noted())


def test_changes_are_made_here_at_once_and_travel_with_the_next_pass():
    lead = leader()
    lead.write([Clear([2]), Copy([1], [3])])
    lead.write([Fold([(1, 2, 3)])])
    assert not lead.channel.commands
    assert not lead.pools[0].state[2].any()
    with torch.no_grad():
        logits = lead.run(STEP, ROWS, Copy([1], [2]), lambda step, taps: None)
    assert logits.shape == (1, 96)
    lead.draft(ROWS, ROWS, ROWS[None])
    lead.write([PoisonAll()])
    lead.stop()
    lead.stop()
    first, second, third = lead.channel.commands
    assert [c.step for c in (first, second, third)] == [1, 2, 3]
    assert first.changes == [Clear([2]), Copy([1], [3]), Fold([(1, 2, 3)])]
    assert (first.body.observe, first.body.exports, first.body.forward) == (True, False, 0)
    assert (first.body.copies, first.body.logit_rows.tolist()) == (Copy([1], [2]), [2])
    assert (second.changes, type(second.body)) == ([], Ask)
    assert (third.changes, third.body) == ([PoisonAll()], Stop())
    assert [c.mark.count for c in (first, second, third)] == [0, 2, 4]
    assert lead.watch.kinds == ["run", "end", "draft", "end", "stop", "end"]
    with pytest.raises(GroupLost, match="told to stop"):
        lead.run(STEP, ROWS)


def test_another_forward_is_named_by_its_number():
    lead = leader()

    def exporting(step):
        return torch.zeros(3, 32, dtype=torch.float64), torch.empty(0)

    exporting.exports = True
    lead.use(exporting)
    assert (lead.forward, lead.exports) == (exporting, True)
    lead.run(STEP, ROWS)
    (sent,) = lead.channel.commands
    assert (sent.body.forward, sent.body.exports, sent.body.observe) == (1, True, False)


@pytest.mark.parametrize("place", ["channel", "pass", "draft"])
def test_after_a_command_that_failed_here_nothing_is_run(place):
    def failing(step):
        raise ValueError("no kernel")

    error = ValueError("no kernel")
    lead = leader(
        Sent(error if place == "channel" else None),
        Blocks(error if place == "draft" else None),
        failing if place == "pass" else None,
    )
    kind = "draft" if place == "draft" else "run"
    for _ in range(2):
        with pytest.raises(GroupLost, match=rf"command 1 \({kind}\) failed on rank 0: ValueError: no kernel"):
            lead.draft(ROWS, ROWS, ROWS[None]) if place == "draft" else lead.run(STEP, ROWS)
    lead.stop()
    assert len(lead.channel.commands) == (place != "channel")


def test_what_cannot_be_sent_is_a_mistake_nobody_else_hears_of(monkeypatch):
    lead = leader()
    lead.write([Clear([2])])
    monkeypatch.setattr("k3compile.runtime.parallel.wire.MOST", 10)
    with pytest.raises(ValueError, match="at most 10"):
        lead.draft(ROWS, ROWS, ROWS[None])
    monkeypatch.undo()
    lead.draft(ROWS, ROWS, ROWS[None])
    assert [(c.step, c.changes) for c in lead.channel.commands] == [(1, [Clear([2])])]


def test_an_interruption_goes_on_and_ends_the_leading():
    lead = leader(blocks=Blocks(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        lead.draft(ROWS, ROWS, ROWS[None])
    with pytest.raises(GroupLost, match="KeyboardInterrupt"):
        lead.run(STEP, ROWS)


GLOO = "[/src/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:32396: Connection reset by peer"


@pytest.mark.parametrize("known", [None, "rank 1 is gone: its process 7 has ended (run)"])
def test_a_collective_that_broke_off_is_told_in_words_without_addresses(known):
    error, asked = RuntimeError(GLOO), []
    lead = leader(Sent(error))
    lead.watch.why = lambda error: asked.append(error) or known
    for _ in range(2):
        with pytest.raises(GroupLost) as lost:
            lead.run(STEP, ROWS)
        unknown = "command 1 (run) failed on rank 0: another rank, or the way to it, is gone"
        assert str(lost.value) == lead.lost == (known or unknown)
    assert asked == [error]


def test_an_error_whose_cause_is_known_does_not_show_the_way_there():
    lead = leader(Sent(RuntimeError(GLOO)))
    lead.watch.why = lambda error: "rank 1 is gone"
    with pytest.raises(GroupLost) as lost:
        lead.run(STEP, ROWS)
    assert lost.value.__cause__ is None
    assert lost.value.__suppress_context__


def test_followers_that_are_gone_do_not_keep_rank_0_from_stopping(caplog):
    lead = leader(Sent(RuntimeError("connection closed by peer")))
    lead.stop()
    assert "could not be told to stop" in caplog.text
