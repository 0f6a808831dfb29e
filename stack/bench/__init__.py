"""Memory presets and a baseline side by side on one machine, in one run: what `launch/bench.py` starts; and what counts and
measures for a forecast.

    python launch/bench.py --contenders baseline,alst,lean --lengths 4096,16384,32768

Top of the import order, beside `train`: it may import every folder but that one. Each contender has its own ranks, so
that memory is told apart and nothing one of them changes reaches another; they take turns, a step each, so that the noise
of the machine hits all alike.

    settings.py     what is compared, at which lengths, and the settings of each contender
    run.py          the order of a run: for each length new ranks, agreement, untimed steps, turns; then the report
    pool.py         the ranks of one contender, seen from the process that the user started
    worker.py       the same ranks from inside: what each does when asked
    contender.py    one step of a memory preset; baseline.py the same from DeepSpeed's and transformers' own pieces
    live_bytes.py   bytes of live tensors, on the device and kept on the host
    calls.py        matrix products and attention calls of a step, their FLOPs, and the time each takes by itself
    traffic.py      bytes and seconds of each kind of communication; gloo.py what CPU ranks hold inside one
    exact.py        a forecast by count for a machine that is not there: `launch/plan.py exact=true`
    step_count.py   two steps counted, on real ranks or fake ones; where.py says which source line made a tensor
    one_process.py  one process for all ranks, on the device of virtual_device.py with the kernels of fake_kernels.py
    probe.py        the constants of this machine: `launch/plan.py probe=true`
    measured.py     what comes from the ranks
    fit.py          fixed bytes + bytes a token; seconds a token + seconds a token squared
    summary.py      from measurements to the numbers of the report; report.py puts them on the console, into JSON and PNG

To compare another preset, add `conf/memory/NAME.yaml` and name it in `--contenders`.
"""
