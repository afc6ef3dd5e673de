"""`python -m rankfold`."""

import sys

from rankfold.cli import main

sys.exit(main())
