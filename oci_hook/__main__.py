"""`python3 -m oci_hook`, for a checkout; nodes run the entry script beside this file."""

from oci_hook.entry import main

main()
