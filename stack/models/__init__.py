"""Plain single-process models from transformers, and what is known of them. No parallelism here.

config.py (settings -> Hugging Face config), rope.py (positions), build.py (module by module, from init.py or weights.py),
spec.py (numbers and accessors), probe.py (what cannot be trained is refused), flops.py, attention.py (is the kernel here).

To add a model family: a file `conf/model/NAME.yaml` with its hub name and config; that is all for a decoder built like
most. If its parts have other names, one line in `FAMILIES` of registry.py. `tests/contract/test_model_contract.py` and
the parity table (tests/parity) then hold it to transformers' own model; add it to the list of families there.
"""
