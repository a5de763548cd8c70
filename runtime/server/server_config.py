"""What an operator may set about the HTTP side; the engine has its own settings."""

from __future__ import annotations

from dataclasses import dataclass

from ..chat_notes import EFFORTS


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server. Raises one ValueError that lists every setting out of its range.

    host: address to listen on; loopback unless others shall reach it. port: 0 takes a free one. model_name:
    the name clients ask for. api_key: what clients must send as a bearer token; none means no check.
    max_body_bytes: longest request body. max_choices: answers one request may ask for, prompts times n.
    effort: how much to think when the client does not say: low, high, max. drain_s: seconds that running
    answers get after SIGTERM. stall_s: seconds a step may take before /health says 503. retry_after_s: what
    a client is told when the queue is full. access_log: log one line a request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "k3"
    api_key: str | None = None
    max_body_bytes: int = 16 << 20
    max_choices: int = 128
    effort: str = "max"
    drain_s: float = 30.0
    stall_s: float = 120.0
    retry_after_s: int = 1
    access_log: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __post_init__(self) -> None:
        wrong = []
        if not 0 <= self.port <= 65535:
            wrong.append(f"port must be from 0 to 65535, got {self.port}")
        if not self.model_name:
            wrong.append("model_name is empty: clients have to name the model")
        if self.api_key == "":
            wrong.append("api_key is empty: give a key, or none at all")
        if self.effort not in EFFORTS:
            wrong.append(f"effort must be one of {', '.join(EFFORTS)}, got {self.effort!r}")
        for name, least in (("max_body_bytes", 1024), ("max_choices", 1), ("retry_after_s", 1)):
            if getattr(self, name) < least:
                wrong.append(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("drain_s", "stall_s"):
            if not getattr(self, name) >= 0:
                wrong.append(f"{name} must be 0 or more seconds, got {getattr(self, name)}")
        if wrong:
            raise ValueError("; ".join(wrong))
