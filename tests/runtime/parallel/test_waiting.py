"""Whoever waits says for what, after a while and then ever more rarely."""

from k3compile.runtime.parallel import waiting
from k3compile.runtime.parallel.waiting import Waiting


def test_lines_come_at_growing_intervals_until_patience_ends(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    wait, asked = Waiting(300.0), []

    def what():
        asked.append(now[0])
        return "rank 1 at 'settings'"

    while not wait.over:
        wait.say(what)
        now[0] += 0.5
    assert asked == [110.0, 120.0, 140.0, 180.0, 260.0]
    assert caplog.messages[0] == "waiting for rank 1 at 'settings' (10 s of 300 s)"
    assert now[0] == 400.5


def test_a_sign_of_life_begins_the_wait_again(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    wait = Waiting(20.0)
    now[0] = 9.0
    wait.restart()
    now[0] = 18.0
    wait.say(str)
    assert not wait.over
    assert not caplog.messages
    now[0] = 29.5
    wait.say(str)
    assert wait.over
    assert len(caplog.messages) == 1
    wait.restart()
    now[0] += 10.5
    wait.say(str)
    assert len(caplog.messages) == 2, "after 10 s again, and not after 20"
