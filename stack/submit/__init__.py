"""From settings to a job on many nodes, and what becomes of it: what `launch/submit.py` starts. Slurm so far.

Top of the import order, beside `train`, of which nothing is imported: a login node needs neither torch nor a GPU.

    arguments.py   the command line: own words, overrides, the tasks of a sweep
    script.py      one readable batch script from the settings of `cluster`; environment.py its lines for modules, variables,
                   network and container
    batch.py       what is asked of Slurm's commands: lint, submit, is it there
    submit.py      the order of it all: check, forecast, write, lint, submit, tell
    folder.py      the run folder of a command line, for scripts submitted by hand
    record.py      job.jsonl, the record that the job itself keeps; status.py what it and the run folder tell a person
    preflight.py   before training, on every rank: node.py looks at the node, verdict.py compares the nodes, traffic.py
                   measures collectives

How a job starts its ranks, goes on behind its time limit and gives up is shell, since it has to work where no Python does:
`launch/slurm/job.sh`, which the written scripts and `launch/slurm/train.sbatch` share.

To support another batch system: its name in `ClusterConfig.scheduler`, directives in script.py, commands in batch.py, and
the few words that job.sh asks of it. To describe another cluster: a file in `conf/cluster`.
"""
