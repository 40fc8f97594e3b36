"""python -m nestpipe"""

import sys

from nestpipe.cli.main import main

sys.exit(main())
