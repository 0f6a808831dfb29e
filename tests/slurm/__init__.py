"""Jobs on a real Slurm: two nodes on this machine, each with a network, host name, processes and shared memory of its own.

`cluster.py` starts and stops it, which takes a second; `conftest.py` gives it to the tests and skips them, with the reason,
where it cannot be had. Needs root and: apt-get install slurmctld slurmd slurm-client munge iproute2.
"""
