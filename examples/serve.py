"""Serve over OpenAI's API: the same as `k3 serve`, which without a folder serves the tiny model.

torchrun --nproc-per-node 8 examples/serve.py --tp 8 --model DIR       on eight ranks
"""

import sys

try:
    from k3compile.cli.main import main

    main(["serve", *sys.argv[1:]])
except KeyboardInterrupt:  # Ctrl-C before anything runs
    sys.exit(130)
