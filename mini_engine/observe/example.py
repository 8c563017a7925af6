"""The run that the trace player shows: eight requests, some of them late, in a pool that is too small for all."""

from mini_engine.errors import RequestError
from mini_engine.llm import LLM
from mini_engine.observe.trace import Trace
from mini_engine.sampling_params import SamplingParams

TOWER = (
    "The Eiffel Tower stands in Paris near the river Seine. It was built of iron for the World's Fair of 1889 and is "
    "330 meters tall. Many artists disliked it at first, and it was meant to be taken down after twenty years. It "
    "stayed because it was useful as a radio antenna. Today about six million people visit it every year, and at night "
    "twenty thousand lamps make it sparkle for five minutes each hour."
)
WATER = (
    "Water on Earth is always on the move. The sun warms the sea, and some of the water rises into the air as vapor. "
    "High above the ground the vapor cools and turns into tiny drops, which form clouds. When the drops are too heavy, "
    "they fall as rain or snow. Rivers carry the water back to the sea, and the journey starts again. This is called "
    "the water cycle, and it has no beginning and no end."
)
# The step before which each request arrives, its name, its question, and the maximum number of tokens of its answer.
# Three prompts are long, and five requests arrive late. SmolLM2-135M-Instruct answers these questions sensibly even
# when it decodes greedily; it answers many others with repetitions.
EXAMPLE = (
    (0, "A", "What is gravity?", 40),
    (0, "B", f"Summarize this text in two sentences. {TOWER}", 44),
    (0, "C", "What is photosynthesis?", 56),
    (3, "D", "Write a haiku about the sea.", 40),
    (3, "E", f"What is the main idea of this text? {WATER}", 44),
    (12, "F", "Explain in two sentences why the sky is blue.", 60),
    (20, "G", "What is a neural network?", 40),
    (34, "H", f"What is this text about? {TOWER}", 32),
)


def serve_example(llm: LLM, trace: Trace) -> None:
    """Serve `EXAMPLE` greedily on the options of `llm`, and record it.

    Raises:
        RequestError: if one of the requests could not fit into the pool even alone.
    """
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
