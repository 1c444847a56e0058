"""Write a quantized checkpoint in a layout of other tools, and read it back.

    python examples/convert.py

A checkpoint in groups of int4 becomes a GPTQ folder that vLLM, SGLang and transformers open; the
engine here runs both folders, and says the same.
"""

from ptq import Engine, SamplingParams, quantize
from ptq.cli import main

ours = quantize(
    "w4_rtn",
    output="output/examples/convert",
    force=True,
).checkpoint
theirs = "output/examples/convert-gptq"
assert main(["convert", str(ours), theirs, "--to", "gptq", "--force"]) == 0

prompt, params = ["def add(a, b):"], SamplingParams(max_tokens=16)
for folder in (ours, theirs):
    print(folder, Engine.from_pretrained(folder).generate(prompt, params)[0].token_ids)
