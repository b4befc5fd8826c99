"""A deterministic simulator of recovery: one process, virtual time, and one integer for a whole history.

The server's decisions and a rank's side of the protocol are the package's own code, from `supervise/`:
`job_control.py`, `job_state.py` and what they use, and `rank_state.py`. Around them are simulated:
the network, processes with their main threads, launchers, signals, and time.

`python -m simulation --seed 7` (from `tests/`) prints a history message by message.
"""
