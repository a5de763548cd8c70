"""Serve over OpenAI's API: the same as `k3 serve`, which without a folder serves the tiny model."""

import sys

from k3compile.cli.main import main

main(["serve", *sys.argv[1:]])
