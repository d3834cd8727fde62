"""Host: how scripts start and end: --help does nothing else, and wrong input and Ctrl-C are one line each."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def command(main: Callable[[Sequence[str] | None], None], arguments: Sequence[str] | None = None) -> None:
    """Runs a script. Exit code 2: wrong input; 1: output cannot be written; 130: Ctrl-C."""
    name = Path(sys.argv[0]).name
    try:
        main(arguments)
    except KeyboardInterrupt:
        print(f"{name}: interrupted: rerun the same command", file=sys.stderr)
        sys.exit(130)
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        print(f"{name}: {error}: correct the path", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"{name}: {error}: make room or choose another place", file=sys.stderr)
        sys.exit(1)


def write_page(page: Path, document: Callable[[], str], description: str | None) -> None:
    """The script that writes a page of the documentation, and takes no options but --help."""
    argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    page.write_text(document(), encoding="utf-8")
    print(page)
