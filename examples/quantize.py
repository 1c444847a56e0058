"""Quantize a model to int8 weights, activations and cache, and generate with the result.

    python examples/quantize.py [MODEL] [DATA]

MODEL is a folder with config.json and safetensors, or a name on the hub; DATA a file of text or
chats. Without them the small model of this repository learns its scales from Python's own library.
"""

import sys

from ptq import Checkpoint, Engine, SamplingParams, quantize

model = sys.argv[1] if len(sys.argv) > 1 else "tiny-python"
data = sys.argv[2] if len(sys.argv) > 2 else None

result = quantize(
    "a8w8c8",
    model=model,
    data=data,
    overrides=["dataset.calibration.samples=16"],  # more samples, better scales
    output="output/examples/quantize",
    force=True,  # in the place of what an earlier run wrote
)
print("written:", result.checkpoint)

# Every scale of weights, inputs and cache as a table of pandas.
scales = Checkpoint.open(result.checkpoint, verify=True).scale_table.to_pandas()
print(scales.groupby("role").size().to_string())

engine = Engine.from_pretrained(result.checkpoint)
for prompt in ("def add(a, b):", "class Node:"):
    answer = engine.generate([prompt], SamplingParams(max_tokens=24))[0]
    print(prompt + answer.text)
