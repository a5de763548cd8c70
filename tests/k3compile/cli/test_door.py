"""The port is taken early, answers late, and what will be served is said at the start."""

import logging
import os
import socket
import subprocess
import sys

import pytest
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.server.server_config import ServerConfig

from k3compile.cli.door import Asked, open_door
from k3compile.serving import plan


def asked(tmp_path, engine=None, **server):
    serving = plan(engine or EngineConfig())
    return Asked(tmp_path, serving, ServerConfig(port=0, **server), "float32", None, False)


def test_a_port_is_taken_and_answers_nobody_yet(tmp_path):
    with open_door(asked(tmp_path)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        listener.listen()
        with pytest.raises(
            ValueError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; ch"
        ):
            open_door(asked(tmp_path)._replace(server=ServerConfig(port=port)))


def test_features_drafts_and_idle_settings_are_said(tmp_path, caplog):
    with caplog.at_level(logging.INFO), open_door(asked(tmp_path, EngineConfig(block_size=64))):
        pass
    assert any(line.startswith("features on: ") for line in caplog.messages)
    assert "drafts: none" in caplog.messages
    assert "block_size is given and does nothing: prefix_cache is off" in caplog.messages
    assert not any("API key" in line for line in caplog.messages)


def test_an_open_door_without_a_key_is_warned_of(tmp_path, caplog):
    with open_door(asked(tmp_path, host="0.0.0.0")):
        pass
    assert "listening on 0.0.0.0 without an API key: whoever reaches it may use it" in caplog.messages


def test_leaving_does_not_wait_for_a_thread():
    code = """
        import sys, threading, time
        from k3compile.cli.door import leave
        threading.Thread(target=time.sleep, args=(60,)).start()
        print("said")
        leave(3)
    """
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line.strip() for line in code.splitlines())],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (3, "said\n"), done.stderr


def test_a_server_whose_output_nobody_reads_goes_on_and_ends_well():
    code = (
        "import logging; from k3compile.cli.door import say; logging.basicConfig(); say('ready'); say('on')"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "WARNING:k3compile.cli.door:standard output is gone (Broken pipe); it would have said: ready"
    ]
