"""A follower does what it is told, in order, and ends at the first thing that is not right."""

import pytest
import torch
from k3compile.runtime.cache.orders import Clear, Copy, PoisonAll
from k3compile.runtime.executor import Executor
from k3compile.runtime.parallel.follow import follow
from k3compile.runtime.parallel.hooks import Unwatched
from k3compile.runtime.parallel.recorder import Mark
from k3compile.runtime.parallel.wire import Ask, Command, Malformed, Run, Stop, encode
from small_models import Row, make_step

STEP = make_step([Row([5, 6, 7], 1)])
ROWS = torch.tensor([2])
RUN = Run(STEP, ROWS, Copy([1], [2]))


class Given:
    """A channel that has these commands, each of ``(changes, body)``, and nothing after them."""

    def __init__(self, *commands, first=1):
        numbered = enumerate(commands, first)
        self.left = [encode(Command(n, Mark(n, 3), changes, body)) for n, (changes, body) in numbered]

    def receive(self):
        if not self.left:
            raise RuntimeError("connection closed by peer")
        return self.left.pop(0)


class Told(Executor):
    """Notes what it is asked."""

    def __init__(self, forward=lambda step: None, blocks=None):
        super().__init__([], forward, blocks=blocks)
        self.told = []

    def write(self, changes):
        self.told.append(("write", changes))

    def run(self, step, logit_rows, copies, observe):
        self.told.append(("run", step.tokens.tolist(), logit_rows.tolist(), copies, observe))

    def draft(self, *given):
        self.told.append(("draft", *(column.tolist() for column in given)))

    def stop(self):
        self.told.append(("stop",))


class Blocks:
    def observe(self, step, taps): ...


def test_commands_are_obeyed_in_order_until_the_stop():
    executor, blocks = Told(), Blocks()
    executor.blocks = blocks
    channel = Given(
        ([PoisonAll(), Clear([1])], RUN),
        ([], RUN._replace(observe=True)),
        ([], Ask(ROWS, ROWS + 1, ROWS[None])),
        ([Clear([3])], Stop()),
        ([], RUN),
    )
    follow(executor, channel)
    assert executor.told == [
        ("write", [PoisonAll(), Clear([1])]),
        ("run", [5, 6, 7], [2], Copy([1], [2]), None),
        ("write", []),
        ("run", [5, 6, 7], [2], Copy([1], [2]), blocks.observe),
        ("write", []),
        ("draft", [2], [3], [[2]]),
        ("write", [Clear([3])]),
        ("stop",),
    ]
    assert len(channel.left) == 1


def test_a_rank_without_a_draft_model_has_nothing_that_learns():
    executor = Told()
    follow(executor, Given(([], RUN._replace(observe=True)), ([], Stop())))
    assert executor.told[1][-1] is None


def test_the_forward_is_the_one_rank_0_names():
    executor = Told()
    executor.use(other := (lambda step: None))
    follow(executor, Given(([], RUN), ([], RUN._replace(forward=1)), ([], Stop())))
    assert executor.forward is other


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (RUN._replace(forward=1), "rank 0 runs forward 1, and this rank was given 1"),
        (
            RUN._replace(exports=True),
            "rank 0 leaves checkpoints inside a prompt, and this",
        ),
    ],
)
def test_another_forward_than_rank_0s_is_refused(run, said):
    with pytest.raises(ValueError, match=said):
        follow(Told(), Given(([], run)))


def test_a_lost_command_and_a_lost_leader_end_it():
    with pytest.raises(Malformed, match="command 2 came where 1 was due"):
        follow(Told(), Given(([], RUN), first=2))
    with pytest.raises(RuntimeError, match="closed by peer") as caught:
        follow(Told(), Given(([], RUN), ([], RUN)))
    assert caught.value.__notes__ == ["this rank follows and ends here, after 2 commands, the last one: run"]


def test_the_marks_of_one_moment_are_compared_before_a_command_is_obeyed():
    class Watch(Unwatched):
        marks = 0

        def mark(self):
            self.marks += 1
            return Mark(self.marks, 3)

        def check(self, mine, leaders):
            if mine != leaders or mine.count == 2:
                raise ArithmeticError(f"{mine} {leaders}")

    executor = Told()
    with pytest.raises(ArithmeticError, match=r"count=2.*count=2"):
        follow(executor, Given(([], RUN), ([], RUN)), Watch())
    assert [entry[0] for entry in executor.told] == ["write", "run"]


def test_what_fails_here_is_raised_as_it_is_and_said_where():
    executor = Told()
    executor.run = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError) as caught:
        follow(executor, Given(([], RUN)))
    assert "after 1 commands, the last one: run" in caught.value.__notes__[0]
