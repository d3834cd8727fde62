"""Host: `python -m dapo_jax.export`; its code is in export.py, whose imports take seconds."""

from dapo_jax.command.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once("export")
    from dapo_jax.export.export import main

    main()
