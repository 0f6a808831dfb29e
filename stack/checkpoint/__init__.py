"""What outlives the process: training state and how it is saved and found again, and the export to Hugging Face format.

A checkpoint is a folder `<run>/checkpoints/step_NNNNNN`. It holds DeepSpeed's files (weights, optimizer states and the
client state of `state.py`), one `rng_rank_NNNNN.pt` a rank, and `manifest.json`, which lists every file with its size and
checksum. The folder is written under a `.partial` name, behind the steps, and renamed last: one without a manifest, or with
files that are not as the manifest says, is not complete and is never resumed from.
"""
