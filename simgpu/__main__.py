"""`python -m simgpu`: make devices and look at them."""

import sys

from simgpu.simgpu import main

sys.exit(main())
