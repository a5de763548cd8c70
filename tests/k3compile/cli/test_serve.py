"""The whole server as a process: the official client, several at once, hang-ups, and an end in time."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from k3compile.runtime.checkpoint import make_checkpoint

from k3compile.cli.main import main
from k3compile.cli.serve import chosen, folder_of, read_key

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "serve.py"  # the same as `k3 serve`
SMALL = ["--port", "0", "--max-model-len", "2048", "--max-num-seqs", "4", "--prefix-match-unit", "64"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("made") / "k3-tiny", "tiny", 0)


class Served:
    """A `k3 serve` of ours; ended whatever happens."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, EXAMPLE, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup may run the tests
        )
        self.log = []
        threading.Thread(target=self._read, daemon=True).start()
        line = self.process.stdout.readline()
        assert " serves " in line, "".join(self.log[-20:])
        self.url = re.search(r"http://\S+/v1", line)[0]
        self.client = openai.OpenAI(base_url=self.url, api_key="any", timeout=60, max_retries=0)

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    def end(self, sig):
        """Seconds from the signal to the end; the exit code must be 0."""
        start = time.monotonic()
        self.process.send_signal(sig)
        assert self.process.wait(30) == 0, "".join(self.log[-20:])
        return time.monotonic() - start

    def metric(self, name):
        text = httpx.get(self.url.replace("/v1", "/metrics")).text
        return float(re.search(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)[1])

    def wait_for_metric(self, name, value):
        deadline = time.monotonic() + 20
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def served(tiny):
    with Served(tiny, *SMALL, "--no-compile") as server:
        yield server


HI = [{"role": "user", "content": "Hi there"}]
GREEDY = {"temperature": 0, "max_tokens": 24}


def test_the_pool_sizes_are_printed(served):
    assert any("pages" in line and "state slots" in line for line in served.log)


def test_what_is_on_and_who_drafts_is_printed(served):
    assert any("features on: prefix_cache, contiguous_views" in line for line in served.log)
    assert any("inert: adaptive_budget (needs speculate)" in line for line in served.log)
    assert any("drafts: none" in line for line in served.log)
    assert any("a state is kept every" in line for line in served.log)


def test_a_prompt_that_comes_again_is_found_and_another_tenants_is_not(served):
    text = "The quick brown fox jumps over the lazy dog. " * 12
    talk, short = [{"role": "user", "content": text}], GREEDY | {"max_tokens": 2}

    def found(endpoint, **options):
        """Tokens of two equal prompts that were not run, where the last multiple of 64 is to be had."""
        usages = [endpoint.create(model="k3-tiny", **options, **short).usage for _ in range(2)]
        assert usages[1].prompt_tokens_details.cached_tokens == (usages[1].prompt_tokens - 1) // 64 * 64 > 0
        return usages[0].prompt_tokens_details.cached_tokens

    client = served.client
    assert found(client.completions, prompt=text) == 0
    assert found(client.completions, prompt=text, extra_body={"cache_salt": "another tenant"}) == 0
    assert found(client.chat.completions, messages=talk) == 0
    options = {"model": "k3-tiny", "stream": True, "stream_options": {"include_usage": True}, **short}
    *_, last = client.chat.completions.create(messages=talk, **options)
    assert last.usage.prompt_tokens_details.cached_tokens > 0
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        client.completions.create(model="k3-tiny", prompt=text, extra_body={"cache_salt": ""})
    queries, hits = (served.metric(f"k3:prefix_cache_{name}_total") for name in ("queries", "hits"))
    assert 3 * 64 < hits < queries


def test_the_model_is_listed_under_the_folders_name(served):
    assert [model.id for model in served.client.models.list()] == ["k3-tiny"]


def test_a_completion_streamed_or_not_is_the_same(served):
    options = {"model": "k3-tiny", "prompt": "The capital of France is", "logprobs": 2, **GREEDY}
    whole = served.client.completions.create(**options)
    text = "".join(
        chunk.choices[0].text for chunk in served.client.completions.create(**options, stream=True)
    )
    assert whole.choices[0].text == text
    assert whole.usage.completion_tokens == 24
    assert len(whole.choices[0].logprobs.token_logprobs) == 24


def test_a_chat_streamed_or_not_is_the_same(served):
    options = {"model": "k3-tiny", "messages": HI, "logprobs": True, "top_logprobs": 3, **GREEDY}
    message = served.client.chat.completions.create(**options).choices[0].message
    stream = served.client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    reasoning = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks[:-1])
    assert message.reasoning_content == reasoning
    assert message.content == ""
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 24


@pytest.mark.slow
def test_two_chats_at_once_give_what_each_gives_alone(served):
    def ask(word, out):
        messages = [{"role": "user", "content": word}]
        answer = served.client.chat.completions.create(model="k3-tiny", messages=messages, **GREEDY)
        out[word] = answer.choices[0].message.reasoning_content

    alone, together = {}, {}
    for word in ("one", "two"):
        ask(word, alone)
    threads = [threading.Thread(target=ask, args=(word, together)) for word in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone


def test_seeded_choices_are_repeatable_and_differ(served):
    options = {"model": "k3-tiny", "prompt": "x", "n": 3, "seed": 7, "max_tokens": 12}
    first = [choice.text for choice in served.client.completions.create(**options).choices]
    again = [choice.text for choice in served.client.completions.create(**options).choices]
    assert first == again
    assert len(set(first)) == 3


def test_bad_requests_raise_the_clients_own_errors(served):
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        served.client.completions.create(model="k3-tiny", prompt="x", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        served.client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="'tools' is not supported yet"):
        served.client.chat.completions.create(model="k3-tiny", messages=HI, tools=[{"type": "function"}])


@pytest.mark.parametrize("streamed", [True, False])
def test_hanging_up_gives_the_pages_and_slots_back(served, streamed):
    body = {"prompt": "x", "max_tokens": 1500, "n": 3, "stream": streamed, "ignore_eos": True}
    if streamed:
        with httpx.stream("POST", served.url + "/completions", json=body, timeout=30) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(served.url + "/completions", json=body, timeout=0.5)
    served.wait_for_metric("k3:num_requests_running", 0)
    assert served.metric("k3:kv_cache_usage_perc") == 0
    assert served.metric("k3:state_slot_usage_perc") == 0


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGHUP])
def test_a_running_answer_may_finish_after_sigterm_and_when_the_terminal_is_gone(tiny, sig):
    with Served(tiny, *SMALL, "--no-compile") as server:
        body = {"prompt": "x", "max_tokens": 40, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", server.url + "/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            assert server.end(sig) < 20
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert rest[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.inductor
def test_it_serves_at_once_and_changes_over_when_compiled(tiny):
    options = {"model": "k3-tiny", "messages": HI, **GREEDY}
    with Served(tiny, *SMALL) as server:
        before = server.client.chat.completions.create(**options).choices[0].message.reasoning_content
        deadline = time.monotonic() + 400
        while not any("serving compiled from now on" in line for line in server.log):
            assert time.monotonic() < deadline, "".join(server.log[-20:])
            time.sleep(0.5)
        after = server.client.chat.completions.create(**options).choices[0].message.reasoning_content
        assert after == before
        assert server.end(signal.SIGINT) < 5


@pytest.mark.inductor
def test_sigint_while_compiling_ends_it_within_five_seconds(tiny):
    with Served(tiny, *SMALL) as server:
        time.sleep(3)
        assert server.end(signal.SIGINT) < 5


def test_what_cannot_be_served_is_one_clear_line_and_code_2(tiny, served, tmp_path, capsys, monkeypatch):
    port = served.url.split(":")[-1].removesuffix("/v1")

    def failing(*arguments):
        with pytest.raises(SystemExit) as end:
            main(["serve", *map(str, arguments)])
        assert end.value.code == 2
        return capsys.readouterr().err

    told = failing(tiny, "--port", port)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in told
    assert "--port" in told
    assert "is no folder" in failing(tmp_path / "nothing")
    assert "is no checkpoint: it has no config.json" in failing(tmp_path)
    assert "max_num_seqs" in failing(tiny, "--max-num-seqs", "0")
    assert "port must be from 0" in failing(tiny, "--port", "99999")
    assert "cannot read the API key" in failing(tiny, "--api-key-file", tmp_path / "nothing")
    monkeypatch.setenv("K3_DISABLE", "contigous_views")
    assert "did you mean 'contiguous_views'?" in failing(tiny)


def test_features_and_keys_are_read(tmp_path):
    assert chosen("default") == "default"
    assert chosen("contiguous_views, latent_tail") == ("contiguous_views", "latent_tail")
    (tmp_path / "key").write_text("sesame\n")
    assert read_key(tmp_path / "key") == "sesame"
    with pytest.raises(ValueError, match="cannot read the API key"):
        read_key(tmp_path / "nothing")


def test_the_folder_may_be_an_argument_or_an_option(tiny, tmp_path):
    assert folder_of(tiny, None) == folder_of(None, tiny) == folder_of(tiny, tiny) == tiny
    with pytest.raises(ValueError, match=r"two checkpoints are given, .* and --model .*: give one of them"):
        folder_of(tiny, tmp_path)


def test_several_ranks_without_a_launcher_are_told_the_command(tiny, capsys, monkeypatch):
    def refused(*arguments):
        with pytest.raises(SystemExit) as end:
            main(["serve", *map(str, arguments)])
        assert end.value.code == 2
        return capsys.readouterr().err

    monkeypatch.setattr(sys, "argv", ["examples/serve.py", "--tp", "8"])
    told = refused(tiny, "--tp", "8")
    assert told.endswith(
        "this is one process. Start 8 of them: "
        "torchrun --standalone --nproc-per-node 8 examples/serve.py --tp 8\n"
    )
    monkeypatch.setattr(sys, "argv", ["/usr/bin/k3", "serve", "--tp", "2"])
    assert "--nproc-per-node 2 -m k3compile.cli.main serve --tp 2" in refused(tiny, "--tp", "2")
    assert "dcp is 2, and must divide tp, which is 1: give 1" in refused(tiny, "--dcp", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set" in refused(tiny, "--tp", "4")
    for name, value in (("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert "tp is 2, but the launcher started 4 processes: give --tp 4, or" in refused(tiny, "--tp", "2")


def test_sigint_ends_it_within_five_seconds_with_a_stream_open(served):
    """The last test of this file: it ends the server that the others share."""
    body = {"prompt": "x", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", served.url + "/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        assert served.end(signal.SIGINT) < 5
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert rest[-1]["error"]["message"] == "the server is stopping"
    assert not any("Traceback" in line for line in served.log)
