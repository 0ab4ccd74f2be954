"""`python -m jaxrag` is the `jaxrag` program."""

import sys

from jaxrag.cli import main

sys.exit(main())
