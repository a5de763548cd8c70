"""Train the tiny K3 that the package ships, on this CPU: problems made on the spot, experts in MXFP4.

    python examples/09_train_k3_tiny.py OUT [--minutes 60] [--resume]

OUT becomes a checkpoint that k3 serve, k3 chat and LLM take, with its DSpark draft in OUT/draft. Progress is
kept in OUT.training, from which --resume goes on.
"""

import argparse
from pathlib import Path

from k3_tiny.run import Plan, train

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out", type=Path, help="folder of the checkpoint")
parser.add_argument("--minutes", type=float, default=60, help="stop by then, whatever is reached")
parser.add_argument("--steps", type=int, default=Plan.steps, help="steps, if there is time for so many")
parser.add_argument("--draft-steps", type=int, default=Plan.draft_steps, help="of the draft, likewise")
parser.add_argument("--problems", type=int, default=Plan.problems, help="of each task, to judge the end by")
parser.add_argument("--seed", type=int, default=0, help="of weights and problems")
parser.add_argument("--eager", action="store_true", help="without Inductor: a third slower, starts at once")
parser.add_argument("--resume", action="store_true", help="go on from the last kept progress")
given = vars(parser.parse_args())
out, resume = given.pop("out"), given.pop("resume")
train(out, Plan(**given), resume, lambda line: print(line, flush=True))
