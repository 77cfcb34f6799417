"""Train with several seeds, one after another, and print the result of each run.

    python examples/python/seeds.py examples/llama3/conf/train.yaml train.model.train_samples=400

Extend the loop for anything else that a sweep requires: other values, another order, early
stopping. For a plain sweep, use `python run.py … -m train.model.seed=1,2,3` instead.
"""

from __future__ import annotations

import sys

import flagscale
from flagscale.errors import JobError


def main(config: str, *overrides: str) -> int:
    print(flagscale.plan(config, overrides).world_size, "rank(s) each")
    failed = 0
    for seed in (1, 2, 3):
        seed_overrides = [f"train.model.seed={seed}", f"experiment.exp_dir=./outputs_seeds/{seed}"]
        try:
            run = flagscale.launch(config, [*overrides, *seed_overrides])
        except JobError as error:
            # The run did not get as far as `experiment.runner.wait_for` requires.
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
