"""Host: `python -m dapo_jax.train`, the training command. Its code is in training/loop.py.

Nothing imports this module: it would take the place of the function `dapo_jax.train`.
"""

if __name__ == "__main__":  # the imports of the loop take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("train")

    from dapo_jax.training.loop import main

    main()
