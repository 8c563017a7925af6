"""The parts of the engine that a reader writes in the homework, and which of them are finished."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from book.grading.chapter import ROOT, load_chapter
from book.grading.progress import Progress, source_hash
from book.grading.submission import load_submission


@dataclass(frozen=True)
class Part:
    """A function of the engine that a graded answer can replace. The exercise that it comes from names it as `part`."""

    name: str
    title: str
    chapter: str
    module: str
    stage: str


LOADING, SCHEDULING, PLANNING, LAYER, SAMPLING = (
    "once, when the model is loaded",
    "at the start of every step: which request computes what, and where it is kept",
    "once per step: what each query sees",
    "in every layer, at every step",
    "at the end of every step",
)
STAGES = (LOADING, SCHEDULING, PLANNING, LAYER, SAMPLING)

_01, _02, _03 = "01_naive_attention", "02_online_softmax", "03_language_model"
_04, _05, _06 = "04_kv_cache_and_sampling", "05_flexattention", "06_paged_kv_cache"
_07 = "07_continuous_batching"

PARTS = (
    Part("gpt2_weights", "Weight map", _03, "mini_engine/models/gpt2.py", LOADING),
    Part("schedule", "Scheduling loop", _07, "mini_engine/scheduler.py", SCHEDULING),
    Part("share_budget", "Token budget", _07, "mini_engine/policy.py", SCHEDULING),
    Part("pages_to_evict", "Eviction", _07, "mini_engine/kv_cache/sliding_window.py", SCHEDULING),
    Part("page_table", "Page table", _06, "mini_engine/kv_cache/page_table.py", SCHEDULING),
    Part("preempt", "Preemption", _07, "mini_engine/policy.py", SCHEDULING),
    Part("admit", "Admission", _07, "mini_engine/policy.py", SCHEDULING),
    Part("match_prefix", "Prefix match", _07, "mini_engine/kv_cache/prefix_sharing.py", SCHEDULING),
    Part("copy_on_write", "Copy on write", _07, "mini_engine/kv_cache/prefix_sharing.py", SCHEDULING),
    Part("mask_mod", "Mask", _05, "mini_engine/attention/masks.py", PLANNING),
    Part("classify_blocks", "Block classes", _05, "mini_engine/attention/block_mask.py", PLANNING),
    Part("physical_blocks", "Physical blocks", _06, "mini_engine/attention/block_mask.py", PLANNING),
    Part("physical_mask", "Physical mask", _06, "mini_engine/attention/block_mask.py", PLANNING),
    Part("rms_norm", "RMSNorm", _03, "mini_engine/models/layers.py", LAYER),
    Part("apply_rope", "RoPE", _01, "mini_engine/rope.py", LAYER),
    Part("append_kv", "Cache append", _04, "mini_engine/kv_cache/paged.py", LAYER),
    Part("masked_attention", "Attention", _01, "mini_engine/attention/naive.py", LAYER),
    Part("merge_states", "State merge", _02, "mini_engine/attention/state.py", LAYER),
    Part("gated_mlp", "Gated MLP", _03, "mini_engine/models/layers.py", LAYER),
    Part("sample", "Sampler", _04, "mini_engine/sampling.py", SAMPLING),
)
"""In the order in which a step passes through them."""


def _finished_exercises(root: Path, parts: Sequence[Part]) -> dict[str, tuple[Part, str]]:
    """By part: the part and its exercise, where the grader passed the homework.py as it is now."""
    finished = {}
    for part in parts:
        homework = root / "chapters" / part.chapter / "homework.py"
        if not homework.exists():
            continue
        now = source_hash(homework.read_text(encoding="utf-8", errors="replace"))
        for exercise, grade in Progress(root).grades(part.chapter).items():
            if grade.part == part.name and grade.passed and grade.hash == now:
                finished[part.name] = (part, exercise)
    return finished


def changed_since(root: Path = ROOT, parts: Sequence[Part] = PARTS) -> dict[str, str]:
    """Chapters whose homework.py has changed since parts of it passed, with the date of that grade."""
    finished, changed = finished_part_names(root, parts), {}
    for part in parts:
        for grade in Progress(root).grades(part.chapter).values():
            if grade.part == part.name and grade.passed and part.name not in finished:
                changed[part.chapter] = grade.date
    return changed


def finished_part_names(root: Path = ROOT, parts: Sequence[Part] = PARTS) -> list[str]:
    """The names of the finished parts: their grader passed, and homework.py has not changed since."""
    return list(_finished_exercises(root, parts))


def finished_parts(root: Path = ROOT, parts: Sequence[Part] = PARTS) -> dict[str, Any]:
    """The reader's own functions and classes for all finished parts, by name of the part."""
    functions = {}
    for name, (part, exercise) in _finished_exercises(root, parts).items():
        chapter = load_chapter(root / "chapters" / part.chapter)
        source = chapter.homework.read_text(encoding="utf-8")
        submission = load_submission(chapter, exercise, source, str(chapter.homework))
        functions[name] = vars(submission)[exercise]
    return functions


def engine_diagram(parts_done: Collection[str]) -> str:
    """The engine as HTML: a box for each stage, in it its parts in order, the finished ones lit."""
    boxes = []
    for stage in STAGES:
        chips = "".join(
            f'<li class="done">{part.title}</li>' if part.name in parts_done else f"<li>{part.title}</li>"
            for part in PARTS
            if part.stage == stage
        )
        boxes.append(f"<div><p>{stage}</p><ol>{chips}</ol></div>")
    return f'<div class="engine-parts">{"".join(boxes)}</div>\n'
