"""`python -m simgpu`: create devices and inspect them."""

import sys

from simgpu.simgpu import main

sys.exit(main())
