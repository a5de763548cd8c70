"""Loading says how far it is, in the way that the terminal or the log can show."""

import io
import logging
import sys

import pytest

from k3compile.cli import progress
from k3compile.cli.progress import loading_progress


class Ranks:
    """A meeting whose slowest rank is always at a fifth."""

    def __init__(self, rank):
        self.rank, self.told = rank, []

    def progress(self, done, total):
        self.told.append((done, total))
        return None if done == 1 else (total // 5, total)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_a_long_load_has_lines(caplog, monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    with caplog.at_level(logging.INFO), loading_progress() as report:
        report(10**9, 4 * 10**9)
    assert caplog.messages == ["loading: 25 % of 4.0 GB"]


def test_and_a_short_one_has_none(caplog):
    with caplog.at_level(logging.INFO), loading_progress() as report:
        report(1, 4)
        report(4, 4)
    assert not caplog.messages


def test_a_terminal_has_a_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with loading_progress() as report:
        report(2_000_000, 8_000_000)
    assert "loading" in shown.getvalue()
    assert "/8.0 MB" in shown.getvalue()


def test_rank_0_shows_the_slowest_and_the_others_only_tell(caplog, monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    for rank, lines in ((0, ["loading: 20 % of 0.0 GB"]), (1, [])):
        caplog.clear()
        ranks = Ranks(rank)
        with caplog.at_level(logging.INFO), loading_progress(ranks) as report:
            report(1, 100)
            report(50, 100)
        assert caplog.messages == lines
        assert ranks.told == [(1, 100), (50, 100)]


def test_what_another_rank_ended_by_comes_through():
    class Failed(Ranks):
        def progress(self, done, total):
            raise ValueError("rank 1 ended: no memory")

    with pytest.raises(ValueError, match="rank 1 ended"), loading_progress(Failed(0)) as report:
        report(1, 2)
