"""Compare a quantized model with its original on tasks that need no network.

    python examples/evaluate.py [CHECKPOINT] [ORIGINAL]

`ptq eval` runs tasks through lm-eval (`pip install 'ptq[eval]'`) on the engine, and says how many
answers flipped.
"""

import sys

from ptq import quantize
from ptq.cli import main

if len(sys.argv) > 2:
    checkpoint, original = sys.argv[1:3]
else:
    original = "recipes/tiny-python"
    checkpoint = quantize("w8_rtn", output="output/examples/evaluate", force=True).checkpoint

sys.exit(main(["eval", str(checkpoint), "--tasks", "local", "--limit", "4", "--against", original]))
