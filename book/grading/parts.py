"""The parts of the engine that a reader writes in the homework, and which of them are finished."""

from collections.abc import Callable, Collection, Sequence
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


LOADING, LAYER, SAMPLING = "once, when the model is loaded", "in every layer, at every step", "at the end of every step"

PARTS = (
    Part("gpt2_weights", "Weight map", "03_language_model", "mini_engine/models/gpt2_weights.py", LOADING),
    Part("rms_norm", "RMSNorm", "03_language_model", "mini_engine/models/layers.py", LAYER),
    Part("apply_rope", "RoPE", "01_naive_attention", "mini_engine/rope.py", LAYER),
    Part("append_kv", "Cache append", "04_kv_cache_and_sampling", "mini_engine/kv_cache/contiguous.py", LAYER),
    Part("masked_attention", "Attention", "01_naive_attention", "mini_engine/attention/naive.py", LAYER),
    Part("merge_states", "State merge", "02_online_softmax", "mini_engine/attention/state.py", LAYER),
    Part("gated_mlp", "Gated MLP", "03_language_model", "mini_engine/models/layers.py", LAYER),
    Part("sample", "Sampler", "04_kv_cache_and_sampling", "mini_engine/sampling.py", SAMPLING),
)
"""In the order in which a step passes through them."""

STAGES = (LOADING, LAYER, SAMPLING)


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
    """The engine as a mermaid flowchart, with the finished parts lit."""
    lines = ["flowchart LR", '    prompt(["prompt"]) --> rms_norm', '    sample --> text(["text"])']
    for number, stage in enumerate(STAGES):
        lines.append(f'    subgraph stage{number}["{stage}"]')
        lines += [f'        {part.name}["{part.title}"]' for part in PARTS if part.stage == stage]
        lines.append("    end")
    steps = [part.name for part in PARTS if part.stage != LOADING]
    lines.append(f"    {' --> '.join(steps)}")
    lines += [
        "    gated_mlp -. next layer .-> rms_norm",
        "    gpt2_weights -.-> stage1",
        "    text -. next token .-> prompt",
    ]
    lines.append("    classDef done fill:#009E73,stroke:#00664b,color:#ffffff")
    if done := [part.name for part in PARTS if part.name in parts_done]:
        lines.append(f"    class {','.join(done)} done")
    return "\n".join(lines) + "\n"
