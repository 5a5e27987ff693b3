"""Steer the GPU's own scheduler from the host: set time slices, and switch channels off and on.

`calls` is the table of driver calls, `driver` makes them, `discovery` finds what a process has on a
GPU, and `trace` reads which process was on it and when. `policy` decides, `steering` carries the
decisions out, `runner` takes the place of an arbiter's thread, and `watchdog` outlives the
governor. None of this runs in a container, and no process has to cooperate. The measurements are in
`docs/reference/driver-calls.md`.
"""
