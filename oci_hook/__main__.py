"""Runs the hook as `python3 -m oci_hook` in a checkout; nodes run the script next to this file."""

from oci_hook.entry import main

main()
