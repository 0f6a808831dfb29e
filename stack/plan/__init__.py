"""The forecast: what a run needs on a machine, known before it is submitted. No GPU, no weights, no network, no torch.

    command.py      the command line of launch/plan.py; report.py, chart.py: what it shows
    verdict.py      fits, tight, does not fit or unproven, with reasons; `gate`, which launches ask
    levers.py       what would save memory, by planning again (changes.py); search.py: longest row, fewest GPUs, curves
    closed_form.py  one run planned: settings.py and shape.py read it, step.py runs it by the sizes of its tensors,
                    states.py, traffic.py and seconds.py add what is kept, moved and waited for
    step.py         from the embedding to the optimizer: forms.py, blocks.py, lean.py and experts.py are the layers,
                    operators.py torch's operators, zero3.py DeepSpeed's gathering, tensors.py sizes with autograd
    machine.py      card, links and host of a site, each number with where it comes from; calibration.py: measured ones
    forecast.py     the one schema of both tiers: this closed form, and the exact count of stack/bench

To add a machine: one file `conf/site/NAME.yaml`. To add a model family whose blocks are norm, attention, residual, norm, MLP,
residual: its name in FAMILIES of shape.py; `tests/unit/test_plan_shape.py` holds it to the built model. A change of a layer
in stack/parallel is made here too, and `tests/unit/test_plan_memory.py` says so where it was forgotten.
"""
