"""The parts of the engine that a reader writes in the homework, and which of them are finished."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from book.grading.chapter import ROOT, find_chapter, load_chapter, read_answers
from book.grading.progress import Grade, Progress, source_hash
from book.grading.submission import load_submission
from mini_engine.attention.spec import Attend
from mini_engine.models.llama import LlamaLayer
from mini_engine.models.qwen3 import Qwen3Attention
from mini_engine.parts import STAGES, Parts


@dataclass(frozen=True)
class Part:
    """A part of the engine that a graded answer can replace. The exercise that it comes from names it as `part`.

    Attributes:
        name: field of `mini_engine.Parts`.
        title: what the part is called.
        chapter: folder of the chapter whose homework it is.
        module: file of the engine that has the default.
        stage: when in a step it runs, one of STAGES.
    """

    name: str
    title: str
    chapter: str
    module: str
    stage: str


def _part(field: Field[Any]) -> Part:
    about = field.metadata
    module = field.default.__module__.replace(".", "/") + ".py"
    return Part(field.name, about["title"], find_chapter(str(about["chapter"])).name, module, about["stage"])


PARTS = tuple(_part(field) for field in fields(Parts))
"""In the order in which a step passes through them."""


def _passed(root: Path, chapter: str) -> dict[str, Grade]:
    """The grades of the exercises that passed with the chapter's homework.py as it is now, by exercise."""
    homework = root / "chapters" / chapter / "homework.py"
    if not homework.exists():
        return {}
    now = source_hash(read_answers(homework))
    grades = Progress(root).grades(chapter).items()
    return {exercise: grade for exercise, grade in grades if grade.passed and grade.hash == now}


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
    passed = {chapter: _passed(root, chapter).values() for chapter in {part.chapter for part in parts}}
    return [part.name for part in parts if any(grade.part == part.name for grade in passed[part.chapter])]


def finished_parts(root: Path = ROOT, parts: Sequence[Part] = PARTS) -> dict[str, Any]:
    """The reader's own functions and classes for all finished parts, by name of the part.

    A part calls the reader's other exercises of its chapter that have passed, and the reference for the rest.
    """
    functions: dict[str, Any] = {}
    for slug in {part.chapter for part in parts}:
        passed = _passed(root, slug)
        if not passed:
            continue
        chapter = load_chapter(root / "chapters" / slug)
        own = vars(load_submission(chapter, passed, read_answers(chapter.homework), str(chapter.homework)))
        functions |= {grade.part: own[exercise] for exercise, grade in passed.items() if grade.part is not None}
        if "decoder_layer" in functions and "LayerWeights" in own:
            functions["decoder_layer"] = _on_layers(functions["decoder_layer"], own["LayerWeights"])
    return {part.name: functions[part.name] for part in parts if part.name in functions}


def _on_layers(own: Callable[..., Tensor], weights_class: Callable[..., Any]) -> Callable[..., Tensor]:
    """The exercise `decoder_layer`, which takes weights and a spec, as the engine's part, which takes a layer."""

    def decoder_layer(layer: LlamaLayer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        attention, mlp = layer.attention, layer.mlp
        fused = attention.qkv, attention.o, layer.mlp_norm, mlp.gate_up, mlp.down
        norms = (attention.q_norm, attention.k_norm) if isinstance(attention, Qwen3Attention) else ()
        return own(x, weights_class(layer.input_norm, *fused, *norms), cos, sin, layer.spec, attend, layer.eps)

    return decoder_layer


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
