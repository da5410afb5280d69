"""The job's kind of prompts, to train a head on, of a seed that no job has.

python experiments/verl/prompts.py FILE.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from run import tasks

COUNT, SEED = 4000, 7919

if __name__ == "__main__":
    lines = [json.dumps({"prompt": prompt}) + "\n" for _, prompt in tasks(COUNT, SEED)]
    Path(sys.argv[1]).write_text("".join(lines))
