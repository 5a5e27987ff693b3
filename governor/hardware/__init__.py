"""The GPU's own scheduler, steered from the host: time slices, and channels that are switched off.

`calls` is the table of driver calls, `driver` makes them, `discovery` finds what a process has on a
GPU, and `trace` reads which process was on it and when. `policy` decides, `steering` carries it
out, `runner` puts it in the place of an arbiter's thread, and `watchdog` outlives the governor.
Nothing of it runs in a container, and no process has to cooperate.
`docs/reference/driver-calls.md` says what was measured.
"""
