"""Chatting: with a server, with a checkpoint, and with what a user types."""

import io

import pytest
from fake_engine import FakeEngine
from k3compile.runtime.checkpoint import make_checkpoint
from rich.console import Console
from serving import ANSWER, LiveServer, says, tokenizer

from k3compile.cli import chat as module
from k3compile.cli.main import main


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        main(["chat", *map(str, arguments)])
    return end.value.code


def test_one_message_to_a_server_prints_thoughts_and_answer(capsys):
    with LiveServer(FakeEngine(says(ANSWER)), api_key="k") as live:
        assert run(live.url, "-m", "Hi", "--api-key", "k") == 0
        assert capsys.readouterr().out == "Let me think.Grüße!\n"
        assert run(live.url, "-m", "Hi") == 2
        assert "401" in capsys.readouterr().err
        assert run(live.url.removesuffix("/v1"), "-m", "Hi", "--api-key", "k") == 2
        assert "does the address end in /v1?" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line(capsys):
    assert run("http://127.0.0.1:9/v1", "-m", "Hi") == 2
    assert "http://127.0.0.1:9/v1" in capsys.readouterr().err


def test_a_conversation_goes_on_until_the_user_leaves(monkeypatch):
    engine = FakeEngine(says(ANSWER))
    lines = iter(["Hi", "", "And?", "/reset", "Again", None])
    monkeypatch.setattr(module, "ask", lambda console: next(lines))
    with LiveServer(engine) as live:
        assert run(live.url, "--system", "Be kind.") == 0
    prompts = [tokenizer().decode(request.prompt) for request in engine.seen]
    assert len(prompts) == 3
    assert "think<|sep|>Let me think.<|close|>think<|sep|><|open|>response<|sep|>Grüße!" in prompts[1]
    assert "And?" in prompts[1]
    assert "And?" not in prompts[2]
    assert "Be kind." in prompts[2]


def test_input_ends_at_quit_or_at_the_end_of_the_input(monkeypatch):
    console = Console(file=io.StringIO())
    for typed, expected in (("  hello ", "hello"), ("/quit", None)):
        monkeypatch.setattr(console, "input", lambda prompt, typed=typed: typed)
        assert module.ask(console) == expected

    def ended(prompt):
        raise EOFError

    monkeypatch.setattr(console, "input", ended)
    assert module.ask(console) is None


def test_an_answer_that_is_stopped_stays_as_far_as_it_came():
    def talk(messages):
        yield "reasoning", "Hm"
        yield "content", "One"
        raise KeyboardInterrupt

    messages = []
    module.converse(Console(file=io.StringIO()), talk, messages, "Hi")
    assert messages[1] == {"role": "assistant", "content": "One", "reasoning_content": "Hm"}


def test_an_error_event_is_raised():
    with pytest.raises(ValueError, match="boom"):
        list(module.deltas_of({"error": {"message": "boom"}}))


def test_a_checkpoint_answers_in_this_process(tmp_path, capsys):
    folder = make_checkpoint(tmp_path / "k3-tiny", "tiny", 0)
    assert run(folder, "-m", "Hi", "--max-tokens", "3", "--effort", "low") == 0
    assert len(capsys.readouterr().out) > 1
    assert run(tmp_path / "nothing", "-m", "Hi") == 2
