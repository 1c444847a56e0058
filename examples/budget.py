"""Say what the model may lose, and let the bits of each layer follow from it.

    python examples/budget.py [MODEL]

The search measures what an error in each group of layers costs the model's predictions, takes the
fewest bytes that keep the whole below the limit, and checks the choice on the real kernels.
"""

import sys

from ptq import quantize

model = sys.argv[1] if len(sys.argv) > 1 else "tiny-python"

result = quantize(
    model=model,
    scheme="w4",
    overrides=[
        "budget.kl=0.02",  # nats to the original; or budget.bytes=2.5GB, budget.bits=4.5
        "dataset.calibration.samples=8",
        "dataset.evaluation.samples=8",
    ],
    output="output/examples/budget",
    force=True,  # in the place of what an earlier run wrote
)
print("written:", result.checkpoint)
print("what was chosen for each layer: output/examples/budget/recipe.yaml")
