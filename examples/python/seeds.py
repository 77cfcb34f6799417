"""Train with several seeds, one after the other, and tell how each has ended.

    python examples/python/seeds.py examples/llama3/conf/train.yaml train.model.train_samples=400

Whatever else is wanted of a sweep is Python: other values, another order, an early end. Where it is
not, `python run.py … -m train.model.seed=1,2,3` does the same.
"""

from __future__ import annotations

import sys

import flagscale
from flagscale.errors import JobError


def main(config: str, *overrides: str) -> int:
    print(flagscale.plan(config, overrides).world_size, "rank(s) each")
    failed = 0
    for seed in (1, 2, 3):
        own = [f"train.model.seed={seed}", f"experiment.exp_dir=./outputs_seeds/{seed}"]
        try:
            run = flagscale.launch(config, [*overrides, *own])
        except JobError as error:
            # It has not got as far as `experiment.runner.wait_for` says.
            print(f"seed {seed}: {error.message.splitlines()[0]}")
            failed += 1
            continue
        try:
            status = run.wait()
        except KeyboardInterrupt:
            run.stop()
            raise
        if status.failure is not None:
            print(f"seed {seed}: {status.failure.headline()}")
            failed += 1
            continue
        print(f"seed {seed}: {status.phase.value} at step {status.step}, loss {status.loss}")
        print("\n".join(run.logs(rank=0, lines=1)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
