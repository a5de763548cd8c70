"""k3compile: a torch.compile backend and a serving runtime for Kimi K3."""

__version__ = "0.1.0"
