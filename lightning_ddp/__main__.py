"""Entry point of ``python -m lightning_ddp``."""

import sys

from lightning_ddp.cli import main

if __name__ == "__main__":
    sys.exit(main())
