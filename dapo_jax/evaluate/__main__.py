"""Host: `python -m dapo_jax.evaluate`; its code is in evaluate.py, whose imports take seconds."""

from dapo_jax.command.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once("evaluate")
    from dapo_jax.evaluate.evaluate import main

    main()
