"""Submit a run to a batch system, after everything that can be known of it has been checked:

    python launch/submit.py +exp=qwen3_1m cluster=slurm cluster.nodes=1 cluster.partition=gpu
    python launch/submit.py +exp=qwen3_1m cluster=slurm dry=true            writes and lints the script, no more
    python launch/submit.py status=runs/qwen3_1m                            where the run stands
    python launch/submit.py -m +exp=qwen3_1m cluster=slurm optim.lr=1e-5,2e-5    an array of runs, a folder each
    python launch/submit.py prepare=16 +exp=qwen3_1m cluster=slurm data=text data.path=FOLDER
                                                                            tokens by an array of 16, and a merge

Settings are those of launch/train.py, whose --help lists them; the cluster's are explained in
stack/config/schema_cluster.py, and conf/cluster has examples. The script goes into the run folder as job.sbatch and can be
submitted again by hand. The job saves itself before its time limit, goes back into the queue and on from there until the
run is done.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works uninstalled and from any folder


def main() -> None:
    """Answer --help at once; else check and submit, or tell the status of a run."""
    if not sys.argv[1:] or {"--help", "-h"} & set(sys.argv[1:]):
        print(__doc__)
        return
    from stack.dist.failure import clear_errors

    with clear_errors():
        from stack.submit.arguments import read_arguments

        request = read_arguments(sys.argv[1:])
        if request.status is not None:
            from stack.submit.status import describe

            print(describe(request.status))
            return
        from stack.submit.submit import submit

        submit(request)


if __name__ == "__main__":
    main()
