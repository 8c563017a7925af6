"""The run that the trace player shows: eight requests, some of them late, in a pool that is too small for all."""

from mini_engine.errors import RequestError
from mini_engine.llm import LLM
from mini_engine.observe.trace import Trace
from mini_engine.sampling_params import SamplingParams

PARAGRAPH = (
    "A library keeps its books on shelves of equal length. Once, every reader reserved a whole room for the books that "
    "they might ask for, and most rooms stood half empty. Now a reader gets one shelf at a time, wherever one is free, "
    "and a card says which shelves are theirs, in order. When all shelves are full, the reader who came last puts the "
    "books back, waits by the door, and fetches them again later. Nobody has to leave, and hardly a shelf stands empty."
)
# Step before which it arrives, name, question, most tokens of the answer. Long and short ones, some of them late.
EXAMPLE = (
    (0, "A", "What is the capital of France?", 40),
    (0, "B", f"Summarize this text in two sentences. {PARAGRAPH}", 44),
    (0, "C", "Name three uses of a paperclip.", 56),
    (3, "D", "Write a haiku about a library at night.", 32),
    (3, "E", f"Who has to wait in this story, and why? {PARAGRAPH}", 36),
    (12, "F", "Explain in two sentences why the sky is blue.", 52),
    (20, "G", "Count from one to ten.", 40),
    (34, "H", f"Give this text a title. {PARAGRAPH}", 24),
)


def record_example(llm: LLM) -> Trace:
    """Serve `EXAMPLE` greedily on the options of `llm`, and return its trace.

    Raises:
        RequestError: if one of the requests could not fit into the pool even alone.
    """
    trace = Trace(llm.tokenizer)
    engine, coming = llm.with_options(on_step=trace.record).engine, list(EXAMPLE)
    while coming or engine.has_unfinished:
        while coming and (coming[0][0] <= len(trace.steps) or not engine.has_unfinished):
            _, name, question, max_tokens = coming.pop(0)
            prompt = llm.chat_prompt([{"role": "user", "content": question}])
            try:
                engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
            except RequestError as error:
                raise RequestError(
                    f"request {name} of the example needs more pages: raise --num-pages; {error}"
                ) from error
        engine.step()
    return trace
