"""Serve a checkpoint over OpenAI's API: the same as `k3 serve`, here for `make serve`'s tiny one."""

import sys

from k3compile.cli.main import main

main(["serve", *(sys.argv[1:] or ["checkpoints/k3-tiny"])])
