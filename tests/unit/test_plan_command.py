"""`launch/plan.py`: what it takes, tells and returns, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stack.config.derive import REPO_ROOT
from stack.errors import ConfigError
from stack.plan.closed_form import plan
from stack.plan.command import read_arguments, run_command
from stack.plan.forecast import CATEGORIES, COMMUNICATION, OVERHEAD, PHASES
from stack.plan.machine import read_machine
from tests.unit.plan_rig import configured

SMALL = ["+exp=qwen3_1m", "site=h100x8", "model.architecture.num_hidden_layers=3"]


def _never(*_: object):
    raise AssertionError("the exact count was not asked for")


def _told(*words: str, exact=_never) -> tuple[int, str]:
    lines: list[str] = []
    code = run_command([*SMALL, *words], exact, lines.append)
    return code, "\n".join(lines)


def test_without_torch_and_with_an_exit_code() -> None:
    """What makes the answer quick: nothing heavy is imported, and nothing of it is needed."""
    script = (
        "import runpy, sys\n"
        f"sys.argv = ['plan.py', *{[*SMALL, 'site.memory_gib=6', 'levers=false']!r}]\n"
        "try:\n    runpy.run_path('launch/plan.py', run_name='__main__')\n"
        "except SystemExit as end:\n    code = end.code\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO_ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert "verdict: does not fit" in done.stdout


def test_the_report_has_all_that_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "new" / "plan.json"
    code, text = _told(f"json={file}")
    assert code == 0
    for word in (
        "verdict: fits", "parameters", "gathered layers", "kept activations", "communication", "need, with the margin",
        "(backward, layer", "a node of 8 rank(s)", "a checkpoint", "attention ", "GEMM", "memory-bound", "hidden behind computation",
        "tokens/s", "MFU", "HFU", "causal pairs only", "all-to-all", "GPU-hours", "assumed (conf/site/h100x8.yaml)", "levers",
    ):  # fmt: skip
        assert word in text, word
    found = json.loads(file.read_text())
    phases = found["forecast"]["memory"]["phases"]
    assert set(phases) == set(PHASES)
    assert all(sum(peak["parts"].values()) == peak["num_bytes"] for peak in phases.values())
    assert found["verdict"]["answer"] == "fits" and found["levers"] and found["stacked"] == []


def test_categories_are_those_of_the_schema() -> None:
    cfg = configured("+exp=qwen3_1m", "model.architecture.num_hidden_layers=3")
    peak = plan(cfg, 8, read_machine(cfg.site)).memory.peak
    assert peak.parts.keys() <= set(CATEGORIES) - {COMMUNICATION, OVERHEAD}


def test_gpus_default_to_one_row_and_to_the_cluster() -> None:
    assert "8 GPU(s), sp 8, dp 1" in _told("levers=false")[1]
    assert "32 GPU(s), sp 8, dp 4" in _told("levers=false", "gpus=32")[1]
    cluster = ("cluster.scheduler=slurm", "cluster.nodes=2", "cluster.gpus_per_node=8")
    assert "16 GPU(s), sp 8, dp 2" in _told("levers=false", *cluster)[1]


def test_documents_change_the_time_and_not_much_else(tmp_path: Path) -> None:
    profile = tmp_path / "lengths.txt"
    profile.write_text("1000\n3000\n500\n")
    cfg = configured("+exp=qwen3_1m", "model.architecture.num_hidden_layers=3")
    machine = read_machine(cfg.site)
    whole, short = plan(cfg, 8, machine), plan(cfg, 8, machine, (1000, 3000, 500))
    assert short.flops.attention < whole.flops.attention / 300
    assert short.memory.peak.num_bytes == whole.memory.peak.num_bytes
    assert whole.assumptions and not short.assumptions
    assert "assumed: every row is one document" not in _told("levers=false", f"documents={profile}")[1]
    assert _told("levers=false", "documents=1000,3000")[0] == 0


def test_parts_that_are_not_known_are_said() -> None:
    def told(*overrides: str) -> str:
        cfg = configured("+exp=qwen3_1m", "model.architecture.num_hidden_layers=2", *overrides)
        return " ".join(plan(cfg, 8, read_machine(cfg.site)).not_modelled)

    assert "rates of fp32" in told("engine.precision=fp32") and "fetching" in told("engine=zero3_offload_all")
    assert "rates of fp32" not in told() and "fetching" not in told()


def test_a_sweep_is_told_and_drawn_by_length(tmp_path: Path) -> None:
    code, text = _told("sweep=seq:131072,65536,131072", f"png={tmp_path / 'a.png'}", "site.memory_gib=4")
    assert code == 4, "none of them fits"
    assert text.count("data.seq_len=131072") == 1
    assert text.index("data.seq_len=65536") < text.index("data.seq_len=131072")


def test_a_machine_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "ours.yaml").write_text("name: ours\ndevice: cuda\nmemory_gib: 5\n")
    code, text = _told("site=ours", "--config-dir", str(tmp_path), "levers=false")
    assert code == 4 and "of 5.0" in text and "site=ours" in text


def test_hydras_questions_are_answered(capsys) -> None:
    assert _told("--cfg", "job") == (0, "") and "qwen3_1m" in capsys.readouterr().out


def test_what_is_not_known_is_said() -> None:
    text = _told("levers=false", "site.host_memory_gib=null", "schedule.steps=null", "schedule.epochs=2")[1]
    assert "of an amount that is not known" in text and "whole run: not known" in text
    text = _told("levers=false")[1]
    assert "rank(s), of 1,860.0" in text and "whole run: 20 steps" in text


def test_searches_write_a_table_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    code, text = _told("sweep=seq:65536,131072", f"png={picture}")
    assert code == 0 and picture.exists() and "data.seq_len=131072" in text
    code, text = _told("search=min_gpus", f"png={picture}", "site.memory_gib=4", "site.nodes=1")
    assert code == 4 and "no number up to gpus=8" in text
    code, text = _told("search=max_seq", f"png={picture}", "site.host_memory_gib=100")
    assert code == 0 and "longest row:" in text and "beyond it a node needs" in text


def test_the_exact_count_is_believed_where_the_tiers_differ(tmp_path: Path) -> None:
    def exact(cfg, ranks, layers):
        assert (ranks, layers) == (8, 2)
        found = plan(cfg, ranks, read_machine(cfg.site))
        found.tier = "exact count"
        for peak in found.memory.phases.values():
            peak.num_bytes *= 20
        return found

    code, text = _told("exact=true", "layers=2", "levers=false", exact=exact)
    assert code == 4 and "the exact count is believed" in text and "forecast by exact count" in text

    def agrees(cfg, ranks, layers):
        found = plan(cfg, ranks, read_machine(cfg.site))
        found.tier = "exact count"
        return found

    file = tmp_path / "plan.json"
    code, text = _told("exact=true", "levers=false", f"json={file}", exact=agrees)
    assert code == 0 and "they agree" in text and "forecast by closed form" in text
    told = json.loads(file.read_text())
    assert (told["forecast"]["tier"], told["exact"]["tier"]) == ("closed form", "exact count")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["gpus=none"], "gpus"),
        (["gpus=12"], "parallel.sp"),
        (["search=longest"], "search"),
        (["sweep=tokens:4"], "sweep"),
        (["sweep=seq:0"], "sweep"),
        (["sweep=seq:4"], "data.seq_len"),
        (["json=/proc/none/plan.json"], "json"),
        (["sweep=seq:65536", "png=/proc/none/plan.png"], "png"),
        (["sweep=seq:65536", "png=plan.docx"], "png"),
        (["site.gemm_share=0"], "site.gemm_share"),
        (["--config-dir", "/no/such/folder"], "config-dir"),
        (["search=max_seq", "sweep=seq:4096"], "sweep"),
        (
            ["search=min_gpus", "search=max_seq"],
            "search='max_seq': expected a word given once: search=min_gpus",
        ),
        (["exact=maybe"], "exact"),
        (["layers=few"], "layers"),
        (["documents=1,x"], "documents"),
        (["documents=DOCUMENTS"], "no UTF-8 text"),
        (
            ["model.architecture.num_hidden_layers=two"],
            "num_hidden_layers='two': expected a whole number above 0",
        ),
        (["model.architecture.num_hidden_layers=0"], "num_hidden_layers=0: expected a whole number above 0"),
        (
            ["engine.overrides.zero_optimization.stage3_max_live_parameters=lots"],
            "parameters='lots': expected a whole",
        ),
        (
            ["engine.overrides={zero_optimization:{sub_group_size:null}}"],
            "sub_group_size=None: expected a whole",
        ),
        (["engine.ds_config=FILE"], "prefetch_bucket_size=True: expected a whole number .*FILE"),
        (["calibration=nowhere"], "calibration"),
        (["memory.mlp_tiles=3"], "memory.mlp_tiles"),
    ],
)
def test_wrong_words_are_told(words: list[str], key: str, tmp_path: Path) -> None:
    (tmp_path / "DOCUMENTS").write_bytes(b"\xff\xfe1\x00")
    (tmp_path / "FILE").write_text('{"zero_optimization": {"stage3_prefetch_bucket_size": true}}')
    files = {f"={name}": f"={tmp_path / name}" for name in ("DOCUMENTS", "FILE")}
    words = [text.replace(*pair) for text in words for pair in files.items() if pair[0] in text] or words
    with pytest.raises(ConfigError, match=key):
        _told(*words)


def test_a_setting_of_the_training_machine_is_not_judged_here() -> None:
    spill = ("memory.spill_folder=/no/such/folder", "memory.host_gib=4", "levers=false")
    code, text = _told(*spill)
    assert code == 0 and "in memory.spill_folder" in text


def test_words_are_kept_from_the_overrides() -> None:
    request = read_arguments(["+exp=qwen3_1m", "gpus=8", "exact=TRUE"])
    assert (
        request.overrides == ("+exp=qwen3_1m",)
        and request.flag("exact", False)
        and request.flag("levers", True)
    )
