"""In the place of `ptq run`: writes a report after a while, or fails, as its settings tell.

`--set seconds=2` works for so long, `--set fail=1` fails, `--set die=9` ends by a signal. A line of
`started` beside the output's folder tells each start.
"""

import os
import sys
import time
from pathlib import Path


def main(words: list[str]) -> int:
    output = Path(words[words.index("--output") + 1])
    options = dict(w.split("=") for w in words if "=" in w)
    with (output.parent / "started").open("a") as started:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        started.write(f"{output.name} {os.environ['OMP_NUM_THREADS']} {gpus}\n")
    time.sleep(float(options.get("seconds", 0)))
    if "die" in options:
        os.kill(os.getpid(), int(options["die"]))
    if "fail" in options:
        print("some lines before\nerror: out of luck\n  and out of power")
        return 2
    (output / "report").mkdir(parents=True)
    (output / "report/report.json").write_text('{"passed": true}')
    return int(options.get("code", 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
